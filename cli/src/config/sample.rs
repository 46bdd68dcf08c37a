//! A sample configuration file: every option, commented out, with its help.

use super::{file::DEFAULT, setting::Setting};

/// How wide its comments are.
const WIDTH: usize = 100;

const HEAD: &str = "\
# A configuration of tensor-relay. Every line is commented out and shows the default, or <what> is expected.
# Flags and environment variables win over this file, and a command's own table wins over [default].
# Relative paths are relative to where the program is started.
";

/// The sample for `settings`. Shared ones are in `[default]`, once.
pub(super) fn of(settings: &[&Setting]) -> String {
    let mut text = String::from(HEAD);
    let shared: Vec<&Setting> = first_of_shared(settings);
    write_table(&mut text, DEFAULT, &shared, settings);
    let mut commands: Vec<&str> = settings.iter().map(|setting| setting.command()).collect();
    commands.dedup();
    for command in commands {
        let own = settings.iter().filter(|setting| setting.command() == command);
        let own: Vec<&Setting> = own.filter(|s| users(s, settings).len() == 1).copied().collect();
        write_table(&mut text, command, &own, settings);
    }
    text
}

/// Each shared setting, as its first command has it.
fn first_of_shared<'s>(settings: &[&'s Setting]) -> Vec<&'s Setting> {
    let mut shared: Vec<&Setting> = vec![];
    for setting in settings.iter().filter(|setting| users(setting, settings).len() > 1) {
        if !shared.iter().any(|known| known.means_the_same_as(setting)) {
            shared.push(setting);
        }
    }
    shared
}

fn users<'s>(setting: &Setting, settings: &[&'s Setting]) -> Vec<&'s str> {
    let same = settings.iter().filter(|other| other.means_the_same_as(setting));
    same.map(|other| other.command()).collect()
}

fn write_table(text: &mut String, name: &str, options: &[&Setting], all: &[&Setting]) {
    if options.is_empty() {
        return;
    }
    text.push_str(&format!("\n[{name}]\n"));
    for setting in options {
        let users = users(setting, all);
        let of = if users.len() > 1 { format!(" For {}.", users.join(", ")) } else { String::new() };
        let choices = setting.choices();
        let one_of =
            if choices.len() > 1 { format!(" One of {}.", choices.join(", ")) } else { String::new() };
        write_comment(text, &format!("{}{one_of}{of} {}", sentence(setting.help()), setting.variable()));
        text.push_str(&format!("#{} = {}\n", setting.key(), value(setting)));
        if setting.takes_pairs() {
            write_comment(
                text,
                &format!("Or as a table: [{name}.{}s], and a line NAME = \"…\" for each.", setting.key()),
            );
        }
    }
}

/// clap takes the full stop from a help text of one sentence.
fn sentence(mut text: String) -> String {
    if !text.ends_with('.') {
        text.push('.');
    }
    text
}

fn write_comment(text: &mut String, paragraph: &str) {
    let mut line = String::from("#");
    for word in paragraph.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
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

/// As a TOML string. JSON's escapes are a subset of TOML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::{file::File, setting, variable};
    use super::*;
    use std::path::Path;

    #[test]
    fn the_sample_says_nothing_and_is_true_when_it_does() {
        let settings = setting::all(&variable::command());
        let sample = of(&settings.iter().collect::<Vec<_>>());
        let parse = |text: &str| File::parse(Path::new("sample"), text, &settings).map_err(|e| e.0).unwrap();
        let silent = parse(&sample);
        assert!(settings.iter().all(|setting| silent.entry(setting).is_none()));
        let with_values = |line: &str| match line.strip_prefix('#') {
            Some(said) if !said.starts_with(' ') && !said.contains('<') => said.to_owned(),
            _ => line.to_owned(),
        };
        let uncommented: Vec<String> = sample.lines().map(with_values).collect();
        let spoken = parse(&uncommented.join("\n"));
        for setting in &settings {
            let key = format!("\n#{} = ", setting.key());
            assert!(sample.contains(&key), "{} {}", setting.command(), setting.key());
            if !setting.defaults().is_empty() {
                assert_eq!(spoken.entry(setting).unwrap().values, setting.defaults(), "{}", setting.key());
            }
        }
    }
}
