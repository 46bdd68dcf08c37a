//! The sample configuration file: every option, commented out, with its help text.

use super::{file::DEFAULT, setting::Setting};

/// The maximum width of comments, in columns.
const LINE_MAX_CHARS: usize = 100;

const HEAD: &str = "\
# A configuration of tensor-relay. Every option is commented out, with its default or a <PLACEHOLDER>.
# Flags and environment variables override this file, and a command's own table overrides [default].
# Relative paths are relative to the working directory of the program.
";

/// The sample for `settings`. Settings that several commands share are in `[default]`, once.
pub(super) fn render(settings: &[&Setting]) -> String {
    let mut text = String::from(HEAD);
    let mut tables = vec![(DEFAULT, vec![])];
    for setting in settings {
        let same = settings.iter().filter(|other| other.means_the_same_as(setting));
        let commands: Vec<&str> = same.map(|other| other.command()).collect();
        match commands.len() {
            1 if tables.last().is_some_and(|(name, _)| *name == setting.command()) => {}
            1 => tables.push((setting.command(), vec![])),
            _ if commands[0] != setting.command() => continue,
            _ => {}
        }
        let index = if commands.len() == 1 { tables.len() - 1 } else { 0 };
        tables[index].1.push((*setting, commands));
    }
    for (name, options) in tables.iter().filter(|(_, options)| !options.is_empty()) {
        text += &format!("\n[{name}]\n");
        options
            .iter()
            .for_each(|(setting, commands)| write_option(&mut text, name, setting, commands));
    }
    text
}

/// Writes one option, which `commands` have.
fn write_option(text: &mut String, table: &str, setting: &Setting, commands: &[&str]) {
    let listed = |before: &str, names: &[String]| match names.len() {
        0 | 1 => String::new(),
        _ => format!(" {before} {}.", names.join(", ")),
    };
    let one_of = listed("One of", &setting.choices());
    let used_by = listed("For", &commands.iter().map(ToString::to_string).collect::<Vec<_>>());
    write_comment(text, &format!("{}{one_of}{used_by} {}", sentence(setting.help()), setting.variable()));
    *text += &format!("#{} = {}\n", setting.key(), value(setting));
    if setting.accepts_pairs() {
        let key = setting.key();
        write_comment(text, &format!("Or as a table: [{table}.{key}s], and a line NAME = \"…\" for each."));
    }
}

/// Adds the full stop that clap removes from a help text of one sentence.
fn sentence(mut text: String) -> String {
    if !text.ends_with('.') {
        text.push('.');
    }
    text
}

fn write_comment(text: &mut String, paragraph: &str) {
    let mut line = String::from("#");
    for word in paragraph.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > LINE_MAX_CHARS {
            *text += &(std::mem::replace(&mut line, "#".into()) + "\n");
        }
        line += &format!(" {word}");
    }
    *text += &(line + "\n");
}

fn value(setting: &Setting) -> String {
    let defaults = setting.defaults();
    match defaults.first() {
        _ if setting.is_switch() => "false".into(),
        Some(value) if value.parse::<f64>().is_ok() => value.clone(),
        Some(value) => quoted(value),
        None if setting.is_repeatable() => format!("[{}]", quoted(&format!("<{}>", setting.value_name()))),
        None => quoted(&format!("<{}>", setting.value_name())),
    }
}

/// `text` as a TOML string. JSON's escapes are a subset of TOML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{file, setting, variable},
        *,
    };
    use std::path::Path;

    #[test]
    fn the_sample_sets_nothing_and_is_valid_when_uncommented() {
        let settings = setting::all(&variable::command());
        let sample = render(&settings.iter().collect::<Vec<_>>());
        let parse = |text: &str| file::parse(Path::new("sample"), text, &settings).map_err(|e| e.0).unwrap();
        assert_eq!(parse(&sample), []);
        let uncomment = |line: &str| match line.strip_prefix('#') {
            Some(entry) if !entry.starts_with(' ') && !entry.contains('<') => entry.to_owned(),
            _ => line.to_owned(),
        };
        let uncommented: Vec<String> = sample.lines().map(uncomment).collect();
        let uncommented = parse(&uncommented.join("\n"));
        for setting in &settings {
            let key = format!("\n#{} = ", setting.key());
            assert!(sample.contains(&key), "{} {}", setting.command(), setting.key());
            if !setting.defaults().is_empty() {
                let entry = uncommented.iter().find(|entry| entry.key == setting.key());
                assert_eq!(entry.unwrap().values, setting.defaults(), "{}", setting.key());
            }
        }
    }
}
