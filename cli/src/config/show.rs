//! `tensor-relay config`: prints the effective value of every option and its source, and the bounds of `serve`.

use super::{
    Layers, bounds, layers,
    setting::{Effective, Origin, Setting},
    variable,
};
use crate::{
    args::ConfigArgs,
    exit::{Exit, UsageError},
    output::print_json,
    table,
};
use serde_json::{Map, Value, json};

/// Printed instead of a secret.
const HIDDEN: &str = "(hidden)";

pub(crate) fn run(args: &ConfigArgs, layers: &Layers) -> anyhow::Result<Exit> {
    let settings = select(args.command.as_deref(), layers.settings())?;
    let effective = settings.iter().map(|setting| Ok((*setting, setting.effective()?)));
    let effective = effective.collect::<Result<Vec<_>, UsageError>>()?;
    let includes_serve = args.command.as_deref().is_none_or(|command| command == "serve");
    let config = includes_serve.then(|| bounds::server_config(layers)).transpose()?;
    if args.json {
        let mut commands: Map<String, Value> = Map::new();
        for (setting, effective) in &effective {
            let options = commands.entry(setting.command()).or_insert_with(|| json!([]));
            options
                .as_array_mut()
                .into_iter()
                .for_each(|all| all.push(as_json(setting, effective)));
        }
        let bounds = config.as_ref().map(bounds::as_json);
        print_json(&json!({ "file": layers.file(), "commands": commands, "serve": bounds }));
        return Ok(Exit::Done);
    }
    match layers.file() {
        Some(file) => crate::log::message!("configuration file: {}", file.display()),
        None => {
            let paths = layers::search_paths(variable::value_of);
            let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            crate::log::message!("no configuration file found at {}", paths.join(" or "));
        }
    }
    let rows: Vec<_> = effective
        .iter()
        .map(|(setting, effective)| row(layers, setting, effective))
        .collect();
    table::print(["COMMAND", "OPTION", "VALUE", "FROM"], &rows);
    config.iter().for_each(bounds::print);
    Ok(Exit::Done)
}

/// The settings of `command`, or all.
fn select<'s>(command: Option<&str>, settings: &'s [Setting]) -> Result<Vec<&'s Setting>, UsageError> {
    let is_selected = |setting: &&Setting| command.is_none_or(|command| setting.command() == command);
    let selected: Vec<&Setting> = settings.iter().filter(is_selected).collect();
    match command {
        Some(command) if selected.is_empty() => {
            let mut commands: Vec<&str> = settings.iter().map(Setting::command).collect();
            commands.dedup();
            Err(UsageError(format!(
                "there is no configurable command {command}; the configurable ones are {}",
                commands.join(", ")
            )))
        }
        _ => Ok(selected),
    }
}

fn as_json(setting: &Setting, effective: &Effective) -> Value {
    let (source, line) = match effective.origin {
        Origin::Variable => ("environment", None),
        Origin::File { line } => ("file", Some(line)),
        Origin::Default => ("default", None),
    };
    json!({
        "option": setting.key(),
        "variable": setting.variable(),
        "values": shown_values(setting, effective),
        "source": source,
        "line": line,
    })
}

fn row(layers: &Layers, setting: &Setting, effective: &Effective) -> [String; 4] {
    let from = match (effective.origin, layers.file()) {
        (Origin::Variable, _) => setting.variable().into(),
        (Origin::File { line }, Some(file)) => format!("{}:{line}", file.display()),
        _ => "default".into(),
    };
    let values = match shown_values(setting, effective) {
        values if values.is_empty() => "(not set)".into(),
        values => values.join(" "),
    };
    [setting.command().into(), setting.name(), values, from]
}

/// The values of `setting` as they are printed.
fn shown_values(setting: &Setting, effective: &Effective) -> Vec<String> {
    match setting.is_secret() && !effective.values.is_empty() {
        true => vec![HIDDEN.into()],
        // A switch has no default in clap; an unset one is off.
        false if setting.is_switch() && effective.values.is_empty() => vec!["false".into()],
        false => effective.values.iter().map(|value| setting.display(value)).collect(),
    }
}
