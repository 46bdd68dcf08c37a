//! The configuration: each option can be set by a flag, by an environment variable and by a key of one file, in this
//! order of precedence.
//!
//! Options are defined in `args.rs` alone. From the clap [`Command`] derived there, [`variable`] assigns each option
//! its variable, [`setting`] selects the options that the file may set, [`mod@file`] reads the file, and [`layers`]
//! applies all of it below the flags. A new option in `args.rs` therefore has all three layers:
//!
//! - Its variable is `TENSOR_RELAY_` and the flag's name, unless `env = "…"` sets another. That is required if flags of
//!   two commands have the same name and different meanings; a test checks it.
//! - Its key in the file is the flag's name. A positional argument is configurable only with `env`; its key is the
//!   field's name.
//! - `value_delimiter` lets a variable hold several values. In the file, a repeatable option accepts an array. If its
//!   value name is `NAME=…`, it also accepts a table, also under the plural of its name.
//! - `hide_env_values = true` marks a secret, which is never printed.
//! - Each switch can be turned off by `--no-` and its name, without further code.
//!
//! For clap, values from the file are defaults. They satisfy `required`, but `conflicts_with` and `requires` consider
//! only flags and variables: where a flag conflicts with a value in the file, the command must prefer the flag.

mod bounds;
pub(crate) mod file;
pub(crate) mod layers;
mod setting;
mod show;
mod switch;
pub(crate) mod variable;

pub(crate) use layers::Layers;
pub(crate) use show::run;

use crate::args::Args;
use clap::{ArgMatches, Command, FromArgMatches, parser::ValueSource};
use std::{ffi::OsString, path::PathBuf};

/// Parses the command line, with defaults from the environment and the file.
///
/// # Errors
/// A [`clap::Error`] for an invalid command line, and for help; a [`crate::exit::UsageError`] for an invalid file or
/// variable.
pub(crate) fn read(argv: &[OsString]) -> anyhow::Result<(Args, Layers)> {
    let command = variable::command();
    let early = EarlyArguments::parse(&command, argv)?;
    let layers = match early.uses_file() {
        true => Layers::find(command, early.file.as_deref())?,
        false => Layers::without_file(command),
    };
    let matches = layers.command(&early.off).try_get_matches_from(argv);
    let matches = matches.map_err(|error| layers.explain(error, early.command.as_deref()))?;
    Ok((Args::from_arg_matches(&matches)?, layers))
}

/// The arguments that are needed before the file can be read. Parsing them ignores errors, which the later full parse
/// reports.
#[derive(Debug, Default)]
struct EarlyArguments {
    command: Option<String>,
    file: Option<PathBuf>,
    /// The ids of the switches that flags turn off.
    off: Vec<String>,
}

impl EarlyArguments {
    /// # Errors
    /// When help or the version is requested, which needs no configuration.
    fn parse(command: &Command, argv: &[OsString]) -> Result<Self, clap::Error> {
        let lenient = switch::with_opposites(command.clone()).ignore_errors(true);
        let matches = lenient.try_get_matches_from(argv)?;
        let mut early = Self { command: matches.subcommand_name().map(Into::into), ..Self::default() };
        let mut level = Some(&matches);
        while let Some(matches) = level {
            early.add(matches);
            level = matches.subcommand().map(|(_, subcommand)| subcommand);
        }
        Ok(early)
    }

    fn add(&mut self, matches: &ArgMatches) {
        if let Ok(Some(file)) = matches.try_get_one::<PathBuf>(variable::FILE) {
            self.file = Some(file.clone());
        }
        let flags = matches.ids().map(clap::Id::as_str);
        let flags = flags.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        self.off.extend(flags.filter_map(switch::opposite_of).map(Into::into));
    }

    /// Whether the command reads the file. A broken file must not affect the other commands.
    fn uses_file(&self) -> bool {
        let command = self.command.as_deref();
        command.is_some_and(|name| setting::is_configurable(name) || name == "config")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, exit::Exit};
    use std::{io::Write, time::Duration};

    fn read_with(file: &str, argv: &[&str]) -> anyhow::Result<args::Command> {
        let mut config = tempfile::NamedTempFile::new()?;
        config.write_all(file.as_bytes())?;
        let mut all: Vec<OsString> = ["tensor-relay", "--config"].map(Into::into).to_vec();
        all.push(config.path().into());
        all.extend(argv.iter().map(Into::into));
        Ok(read(&all)?.0.command)
    }

    fn serve(file: &str, argv: &[&str]) -> args::ServeArgs {
        match read_with(file, &[&["serve"], argv].concat()).unwrap() {
            args::Command::Serve(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn subscribe(file: &str, argv: &[&str]) -> args::SubscribeArgs {
        match read_with(file, &[&["subscribe"], argv].concat()).unwrap() {
            args::Command::Subscribe(args) => *args,
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
    fn the_file_overrides_defaults_and_flags_override_the_file() {
        let args = serve(FILE, &[]);
        assert_eq!(
            (args.server.grace, args.json, args.server.advertise.len()),
            (Duration::from_millis(500), true, 2)
        );
        assert_eq!(args.codec, args::Codec::Raw, "a command's own table overrides [default]");
        assert_eq!(args.chunk_size, 4 << 20, "an option that is not set has its default");
        let topics: Vec<_> = args.topics.iter().map(|(topic, _)| topic.as_str()).collect();
        assert_eq!(topics, ["policy", "kv/req"], "in the order of the file");
        let args = serve(FILE, &["--grace=7", "--topic", "other=o", "--advertise=c"]);
        assert_eq!((args.server.grace, args.server.advertise.len()), (Duration::from_secs(7), 1));
        assert_eq!(args.topics.len(), 1, "flags replace the values of the file");
    }

    #[test]
    fn required_options_may_come_from_the_file() {
        let args = subscribe(FILE, &[]);
        assert_eq!((args.ticket.ticket.as_str(), args.quiet), ("relay://x", true));
        assert_eq!(args.ticket.connection.connect_timeout, Duration::from_secs(3));
        assert_eq!(subscribe(FILE, &["relay://y"]).ticket.ticket, "relay://y");
        assert!(read_with("", &["subscribe"]).unwrap_err().is::<clap::Error>());
    }

    #[test]
    fn a_switch_of_the_file_can_be_turned_off() {
        assert!(!serve(FILE, &["--no-json"]).json);
        assert!(serve(FILE, &["--no-json", "--json"]).json, "the last flag counts");
        assert!(!serve(FILE, &["--json", "--no-json"]).json);
        assert!(!serve("", &["--topic=a=b", "--no-json"]).json);
    }

    #[test]
    fn invalid_command_lines_are_rejected_with_a_file_too() {
        for argv in [&["serve", "--bogus"][..], &["subscribe", "a", "b"], &["serve", "--grace=x"], &["bogus"]]
        {
            let error = read_with(FILE, argv).unwrap_err();
            assert_eq!(error.downcast::<clap::Error>().unwrap().exit_code(), 2, "{argv:?}");
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
    fn a_broken_file_does_not_affect_commands_that_ignore_it() {
        assert!(read_with("broken [", &["completions", "bash"]).is_ok());
        assert!(read_with("broken [", &["config"]).is_err());
    }
}
