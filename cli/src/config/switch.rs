//! Hidden flags `--no-NAME`, which turn off switches that the file or a variable turns on.

use clap::{Arg, ArgAction, Command};

/// The prefix of a negated switch.
const NO: &str = "no-";

/// Adds a hidden `--no-NAME` for each switch `--NAME` of `command`. If both are given, the last one counts.
pub(super) fn with_opposites(command: Command) -> Command {
    let opposites: Vec<Arg> = command.get_arguments().filter_map(opposite).collect();
    command.args(opposites).mut_subcommands(with_opposites)
}

/// The id of the switch that the argument called `id` negates.
pub(super) fn opposite_of(id: &str) -> Option<&str> {
    id.strip_prefix(NO)
}

fn opposite(arg: &Arg) -> Option<Arg> {
    let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
    let long = arg.get_long().filter(|long| is_switch && !long.starts_with(NO))?;
    // No other id begins with `no-`: the id of a derived argument is its field's name and contains no dash.
    let opposite = Arg::new(format!("{NO}{}", arg.get_id())).long(format!("{NO}{long}"));
    Some(opposite.action(ArgAction::SetTrue).overrides_with(arg.get_id()).hide(true))
}
