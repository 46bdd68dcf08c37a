//! Switches, and how one that the file or a variable turned on is turned off again.

use clap::{Arg, ArgAction, Command};

/// What stands before a switch's name in its opposite's.
const NO: &str = "no-";

/// `command` with a hidden `--no-NAME` beside each switch `--NAME`. Of the two, the last one counts.
pub(super) fn with_opposites(command: Command) -> Command {
    if command.is_hide_set() {
        return command;
    }
    let opposites: Vec<Arg> = command.get_arguments().filter_map(opposite).collect();
    command.args(opposites).mut_subcommands(with_opposites)
}

/// The id of the switch that the argument called `id` is the opposite of.
pub(super) fn opposite_of(id: &str) -> Option<&str> {
    id.strip_prefix(NO)
}

fn opposite(arg: &Arg) -> Option<Arg> {
    let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
    let long = arg.get_long().filter(|long| is_switch && !long.starts_with(NO))?;
    // The id of a derived argument is its field's name and holds no dash: no other begins with this.
    let opposite = Arg::new(format!("{NO}{}", arg.get_id())).long(format!("{NO}{long}"));
    Some(opposite.action(ArgAction::SetTrue).overrides_with(arg.get_id()).hide(true))
}
