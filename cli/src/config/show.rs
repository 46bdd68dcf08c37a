//! `tensor-relay config`: shows the effective value of every option, and its source; and the bounds of `serve`.

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
    let settings = chosen(args.command.as_deref(), layers.settings())?;
    if args.sample {
        print_line(sample::of(&settings).trim_end());
        return Ok(Exit::Done);
    }
    let in_force = settings.iter().map(|setting| Ok((*setting, layers.in_force(setting)?)));
    let in_force = in_force.collect::<Result<Vec<_>, UsageError>>()?;
    let is_of_serve = args.command.as_deref().is_none_or(|command| command == "serve");
    let bounds = is_of_serve.then(|| ServeBounds::of(layers)).transpose()?;
    match args.json {
        true => print_line(&as_json(layers, &in_force, bounds.as_ref()).to_string()),
        false => {
            print_table(layers, &in_force);
            bounds.iter().for_each(ServeBounds::print);
        }
    }
    Ok(Exit::Done)
}

fn chosen<'s>(command: Option<&str>, settings: &'s [Setting]) -> Result<Vec<&'s Setting>, UsageError> {
    let wanted = |setting: &&Setting| command.is_none_or(|command| setting.command() == command);
    let chosen: Vec<&Setting> = settings.iter().filter(wanted).collect();
    match command {
        Some(command) if chosen.is_empty() => {
            let mut known: Vec<&str> = settings.iter().map(Setting::command).collect();
            known.dedup();
            Err(UsageError(format!(
                "no command {command} can be configured; these can: {}",
                known.join(", ")
            )))
        }
        _ => Ok(chosen),
    }
}

fn as_json(
    layers: &Layers,
    in_force: &[(&Setting, EffectiveSetting)],
    bounds: Option<&ServeBounds>,
) -> Value {
    let mut commands: Map<String, Value> = Map::new();
    for (setting, in_force) in in_force {
        let options = commands.entry(setting.command()).or_insert_with(|| json!([]));
        if let Value::Array(options) = options {
            options.push(option_as_json(setting, in_force));
        }
    }
    json!({
        "file": layers.file().map(super::file::File::path),
        "commands": commands,
        "serve": bounds.map(ServeBounds::as_json),
    })
}

fn option_as_json(setting: &Setting, in_force: &EffectiveSetting) -> Value {
    let (source, line) = match in_force.origin {
        Origin::Variable => ("environment", None),
        Origin::File { line } => ("file", Some(line)),
        Origin::Default => ("default", None),
    };
    json!({
        "option": setting.key(),
        "variable": setting.variable(),
        "values": shown(setting, in_force),
        "source": source,
        "line": line,
    })
}

fn print_table(layers: &Layers, in_force: &[(&Setting, EffectiveSetting)]) {
    match layers.file() {
        Some(file) => crate::log::say!("configuration file: {}", file.path().display()),
        None => {
            let places = layers::places(variable::value_of);
            let places: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
            crate::log::say!("no configuration file: neither {}", places.join(" nor "));
        }
    }
    let rows: Vec<[String; 4]> = in_force
        .iter()
        .map(|(setting, in_force)| row(layers, setting, in_force))
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

fn row(layers: &Layers, setting: &Setting, in_force: &EffectiveSetting) -> [String; 4] {
    let from = match in_force.origin {
        Origin::Variable => setting.variable().into(),
        Origin::File { line } => layers
            .file()
            .map_or_else(String::new, |file| format!("{}:{line}", file.path().display())),
        Origin::Default => "default".into(),
    };
    let values = match shown(setting, in_force) {
        values if values.is_empty() => "(not set)".into(),
        values => values.join(" "),
    };
    [setting.command().into(), setting.word(), values, from]
}

fn shown(setting: &Setting, in_force: &EffectiveSetting) -> Vec<String> {
    match setting.is_secret() && !in_force.values.is_empty() {
        true => vec![HIDDEN.into()],
        // To clap a switch has no default: it is off.
        false if setting.is_switch() && in_force.values.is_empty() => vec!["false".into()],
        false => in_force.values.iter().map(|value| setting.plain(value)).collect(),
    }
}
