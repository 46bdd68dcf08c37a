//! The configuration: every option by flag, by environment variable and by one file, in this order of precedence.
//!
//! What an option is stands in `args.rs` and nowhere else. From the clap [`Command`] that is derived there,
//! [`variable`] gives each option its variable, [`setting`] knows which of them the file may set, [`mod@file`] reads the
//! file, and [`layers`] puts all of it below the flags. So a new option has all three layers by being written in
//! `args.rs`:
//!
//! - Its variable is `TENSOR_RELAY_` and its flag's name, unless it states `env = "…"` of its own. It must when two
//!   commands have a flag of one name and two meanings; a test says so.
//! - Its key in the file is its flag's name. A positional argument is configurable if it states `env` and is then known
//!   by its field's name.
//! - `value_delimiter` lets a variable hold several values; in the file a repeatable option takes an array. If its value
//!   name is `NAME=…`, it takes a table too, also under its plural.
//! - `hide_env_values = true` makes it a secret: it is never printed.
//! - A switch can be turned off again by `--no-` and its name; it needs nothing for that.
//!
//! clap takes values from the file for defaults. So `required` is met by them, but `conflicts_with` and `requires` look
//! at flags and variables only: a flag wins over what it conflicts with in the file, and the command must prefer it.

mod bounds;
pub(crate) mod file;
pub(crate) mod layers;
mod sample;
mod setting;
mod show;
mod switch;
pub(crate) mod variable;

pub(crate) use layers::Layers;
pub(crate) use show::run;

use crate::args::Args;
use clap::{ArgMatches, Command, FromArgMatches, parser::ValueSource};
use std::{ffi::OsString, path::PathBuf};

/// Reads the command line with the environment and the file below it.
///
/// # Errors
/// A [`clap::Error`] for what is wrong with the words, and for help; a [`crate::exit::UsageError`] for what is wrong
/// with the file or a variable.
pub(crate) fn read(words: &[OsString]) -> anyhow::Result<(Args, Layers)> {
    let command = variable::command();
    let glance = EarlyArguments::at(&command, words)?;
    let layers = match glance.heeds_file() {
        true => Layers::find(command, glance.file.as_deref())?,
        false => Layers::without_file(command),
    };
    let matches = layers.command(&glance.off).try_get_matches_from(words);
    let matches = matches.map_err(|error| layers.explain(error, glance.command.as_deref(), words))?;
    Ok((Args::from_arg_matches(&matches)?, layers))
}

/// The facts about the command line that are needed before the file can be read. Errors are ignored here; they are
/// reported when it is parsed for good.
#[derive(Debug, Default)]
struct EarlyArguments {
    command: Option<String>,
    file: Option<PathBuf>,
    /// The switches turned off, by id.
    off: Vec<String>,
    wants_sample: bool,
}

impl EarlyArguments {
    /// # Errors
    /// When the words ask for help or the version, which is then shown without any configuration.
    fn at(command: &Command, words: &[OsString]) -> Result<Self, clap::Error> {
        let lenient = switch::with_opposites(command.clone()).ignore_errors(true);
        let matches = lenient.try_get_matches_from(words)?;
        let mut glance = Self { command: matches.subcommand_name().map(Into::into), ..Self::default() };
        let mut level = Some(&matches);
        while let Some(matches) = level {
            glance.look_at(matches);
            level = matches.subcommand().map(|(_, deeper)| deeper);
        }
        Ok(glance)
    }

    fn look_at(&mut self, matches: &ArgMatches) {
        if let Ok(Some(file)) = matches.try_get_one::<PathBuf>(variable::FILE) {
            self.file = Some(file.clone());
        }
        self.wants_sample |= matches!(matches.try_get_one("sample"), Ok(Some(true)));
        let told = matches.ids().map(clap::Id::as_str);
        let told = told.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        self.off.extend(told.filter_map(switch::opposite_of).map(Into::into));
    }

    /// Whether the file applies to the command. A broken file must not affect the others.
    fn heeds_file(&self) -> bool {
        let command = self.command.as_deref();
        command.is_some_and(|name| setting::is_configurable(name) || (name == "config" && !self.wants_sample))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, exit::Exit};
    use std::{io::Write, time::Duration};

    fn read_with(file: &str, words: &[&str]) -> anyhow::Result<args::Command> {
        let mut config = tempfile::NamedTempFile::new()?;
        config.write_all(file.as_bytes())?;
        let mut all: Vec<OsString> = ["tensor-relay", "--config"].map(Into::into).to_vec();
        all.push(config.path().into());
        all.extend(words.iter().map(Into::into));
        Ok(read(&all)?.0.command)
    }

    fn serve(file: &str, words: &[&str]) -> args::ServeArgs {
        match read_with(file, &[&["serve"], words].concat()).unwrap() {
            args::Command::Serve(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn subscribe(file: &str, words: &[&str]) -> args::SubscribeArgs {
        match read_with(file, &[&["subscribe"], words].concat()).unwrap() {
            args::Command::Subscribe(args) => args,
            other => panic!("{other:?}"),
        }
    }

    const FILE: &str = r#"
        [default]
        connect_timeout = 3
        codec = "zstd"

        [serve]
        grace = 0.5
        codec = "raw"
        advertise = ["a", "b:1"]
        json = true
        [serve.topics]
        policy = "p.safetensors"
        "kv/req" = "k.safetensors"

        [subscribe]
        ticket = "relay://x"
        quiet = true
    "#;

    #[test]
    fn the_file_stands_below_the_flags_and_above_the_defaults() {
        let args = serve(FILE, &[]);
        assert_eq!((args.grace, args.json, args.advertise.len()), (Duration::from_millis(500), true, 2));
        assert_eq!(args.codec, args::Codec::Raw, "a command's own table is nearer than [default]");
        assert_eq!(args.chunk_size, 4 << 20, "what nobody says is the default");
        let topics: Vec<_> = args.topics.iter().map(|(topic, _)| topic.as_str()).collect();
        assert_eq!(topics, ["policy", "kv/req"], "in the order of the file");
        let args = serve(FILE, &["--grace=7", "--topic", "other=o", "--advertise=c"]);
        assert_eq!((args.grace, args.advertise.len()), (Duration::from_secs(7), 1));
        assert_eq!(args.topics.len(), 1, "flags replace what the file has; they do not add to it");
    }

    #[test]
    fn what_is_required_may_come_from_the_file() {
        let args = subscribe(FILE, &[]);
        assert_eq!((args.ticket.ticket.as_str(), args.quiet), ("relay://x", true));
        assert_eq!(args.ticket.connect_timeout, Duration::from_secs(3));
        assert_eq!(subscribe(FILE, &["relay://y"]).ticket.ticket, "relay://y");
        assert!(read_with("", &["subscribe"]).unwrap_err().is::<clap::Error>());
    }

    #[test]
    fn a_switch_of_the_file_can_be_turned_off() {
        assert!(!serve(FILE, &["--no-json"]).json);
        assert!(serve(FILE, &["--no-json", "--json"]).json, "the last word counts");
        assert!(!serve(FILE, &["--json", "--no-json"]).json);
        assert!(!serve("", &["--topic=a=b", "--no-json"]).json);
    }

    #[test]
    fn words_are_judged_as_without_a_file() {
        for words in
            [&["serve", "--bogus"][..], &["subscribe", "a", "b"], &["serve", "--grace=x"], &["bogus"]]
        {
            let error = read_with(FILE, words).unwrap_err();
            assert_eq!(error.downcast::<clap::Error>().unwrap().exit_code(), 2, "{words:?}");
        }
        let help = read_with("broken [", &["serve", "--help"]).unwrap_err();
        assert_eq!(help.downcast::<clap::Error>().unwrap().exit_code(), 0);
    }

    #[test]
    fn the_file_is_found_by_a_global_flag_anywhere() {
        let words =
            |file: &str| ["tensor-relay", "serve", "--topic=a=b", "--config", file].map(OsString::from);
        let error = read(&words("/no/such/file")).unwrap_err();
        assert_eq!(crate::exit::code_of(&error), Exit::Usage);
        assert!(error.to_string().contains("/no/such/file"), "{error}");
        assert!(read(&words("/dev/null")).is_ok());
    }

    #[test]
    fn a_broken_file_keeps_nobody_from_what_does_not_read_it() {
        assert!(read_with("broken [", &["config", "--sample"]).is_ok());
        assert!(read_with("broken [", &["man"]).is_ok());
        assert!(read_with("broken [", &["config"]).is_err());
    }
}
