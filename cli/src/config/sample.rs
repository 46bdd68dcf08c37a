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
    let shared: Vec<&Setting> = shared_settings(settings);
    write_table(&mut text, DEFAULT, &shared, settings);
    let mut commands: Vec<&str> = settings.iter().map(|setting| setting.command()).collect();
    commands.dedup();
    for command in commands {
        let own = settings.iter().filter(|setting| setting.command() == command);
        let own: Vec<&Setting> = own
            .filter(|setting| commands_with(setting, settings).len() == 1)
            .copied()
            .collect();
        write_table(&mut text, command, &own, settings);
    }
    text
}

/// The settings that several commands share, each once, from the first of these commands.
fn shared_settings<'s>(settings: &[&'s Setting]) -> Vec<&'s Setting> {
    let mut shared: Vec<&Setting> = vec![];
    for setting in settings.iter().filter(|setting| commands_with(setting, settings).len() > 1) {
        if !shared.iter().any(|first| first.means_the_same_as(setting)) {
            shared.push(setting);
        }
    }
    shared
}

/// The commands that have `setting`.
fn commands_with<'s>(setting: &Setting, settings: &[&'s Setting]) -> Vec<&'s str> {
    let same = settings.iter().filter(|other| other.means_the_same_as(setting));
    same.map(|other| other.command()).collect()
}

fn write_table(text: &mut String, name: &str, options: &[&Setting], all: &[&Setting]) {
    if options.is_empty() {
        return;
    }
    text.push_str(&format!("\n[{name}]\n"));
    for setting in options {
        let commands = commands_with(setting, all);
        let used_by =
            if commands.len() > 1 { format!(" For {}.", commands.join(", ")) } else { String::new() };
        let choices = setting.choices();
        let one_of =
            if choices.len() > 1 { format!(" One of {}.", choices.join(", ")) } else { String::new() };
        write_comment(text, &format!("{}{one_of}{used_by} {}", sentence(setting.help()), setting.variable()));
        text.push_str(&format!("#{} = {}\n", setting.key(), value(setting)));
        if setting.accepts_pairs() {
            write_comment(
                text,
                &format!("Or as a table: [{name}.{}s], and a line NAME = \"…\" for each.", setting.key()),
            );
        }
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
            text.push_str(&format!("{line}\n"));
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&format!("{line}\n"));
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
    use super::super::{file::File, setting, variable};
    use super::*;
    use std::path::Path;

    #[test]
    fn the_sample_sets_nothing_and_is_valid_when_uncommented() {
        let settings = setting::all(&variable::command());
        let sample = render(&settings.iter().collect::<Vec<_>>());
        let parse = |text: &str| File::parse(Path::new("sample"), text, &settings).map_err(|e| e.0).unwrap();
        let unset = parse(&sample);
        assert!(settings.iter().all(|setting| unset.entry(setting).is_none()));
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
                assert_eq!(
                    uncommented.entry(setting).unwrap().values,
                    setting.defaults(),
                    "{}",
                    setting.key()
                );
            }
        }
    }
}
