//! `tensor-relay config`: prints the effective value of every option and its source, and the bounds of `serve`.

use super::{
    Layers,
    bounds::ServeBounds,
    layers::{self, EffectiveSetting, Origin},
    sample,
    setting::Setting,
    variable,
};
use crate::{
    args::ConfigArgs,
    exit::{Exit, UsageError},
    subscribe::print_line,
};
use serde_json::{Map, Value, json};

/// Printed instead of a secret.
const HIDDEN: &str = "(hidden)";

pub(crate) fn run(args: &ConfigArgs, layers: &Layers) -> anyhow::Result<Exit> {
    let settings = select(args.command.as_deref(), layers.settings())?;
    if args.sample {
        print_line(sample::render(&settings).trim_end());
        return Ok(Exit::Done);
    }
    let effective = settings.iter().map(|setting| Ok((*setting, layers.effective(setting)?)));
    let effective = effective.collect::<Result<Vec<_>, UsageError>>()?;
    let includes_serve = args.command.as_deref().is_none_or(|command| command == "serve");
    let bounds = includes_serve.then(|| ServeBounds::of(layers)).transpose()?;
    match args.json {
        true => print_line(&as_json(layers, &effective, bounds.as_ref()).to_string()),
        false => {
            print_table(layers, &effective);
            bounds.iter().for_each(ServeBounds::print);
        }
    }
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

fn as_json(
    layers: &Layers,
    effective: &[(&Setting, EffectiveSetting)],
    bounds: Option<&ServeBounds>,
) -> Value {
    let mut commands: Map<String, Value> = Map::new();
    for (setting, effective) in effective {
        let options = commands.entry(setting.command()).or_insert_with(|| json!([]));
        if let Value::Array(options) = options {
            options.push(option_as_json(setting, effective));
        }
    }
    json!({
        "file": layers.file().map(super::file::File::path),
        "commands": commands,
        "serve": bounds.map(ServeBounds::as_json),
    })
}

fn option_as_json(setting: &Setting, effective: &EffectiveSetting) -> Value {
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

fn print_table(layers: &Layers, effective: &[(&Setting, EffectiveSetting)]) {
    match layers.file() {
        Some(file) => crate::log::message!("configuration file: {}", file.path().display()),
        None => {
            let paths = layers::search_paths(variable::value_of);
            let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            crate::log::message!("no configuration file found at {}", paths.join(" or "));
        }
    }
    let rows: Vec<[String; 4]> = effective
        .iter()
        .map(|(setting, effective)| row(layers, setting, effective))
        .collect();
    let title = ["COMMAND", "OPTION", "VALUE", "FROM"].map(String::from);
    let width = |column: usize| {
        rows.iter()
            .chain([&title])
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let (command, option, value) = (width(0), width(1), width(2));
    for [a, b, c, from] in std::iter::once(&title).chain(&rows) {
        print_line(&format!("{a:command$}  {b:option$}  {c:value$}  {from}"));
    }
}

fn row(layers: &Layers, setting: &Setting, effective: &EffectiveSetting) -> [String; 4] {
    let from = match effective.origin {
        Origin::Variable => setting.variable().into(),
        Origin::File { line } => layers
            .file()
            .map_or_else(String::new, |file| format!("{}:{line}", file.path().display())),
        Origin::Default => "default".into(),
    };
    let values = match shown_values(setting, effective) {
        values if values.is_empty() => "(not set)".into(),
        values => values.join(" "),
    };
    [setting.command().into(), setting.name(), values, from]
}

/// The values of `setting` as they are printed.
fn shown_values(setting: &Setting, effective: &EffectiveSetting) -> Vec<String> {
    match setting.is_secret() && !effective.values.is_empty() {
        true => vec![HIDDEN.into()],
        // A switch has no default in clap; an unset one is off.
        false if setting.is_switch() && effective.values.is_empty() => vec!["false".into()],
        false => effective.values.iter().map(|value| setting.display(value)).collect(),
    }
}
