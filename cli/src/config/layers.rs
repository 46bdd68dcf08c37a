//! The layers below the flags: variables, the file and the defaults.

use super::{
    file::{self, DEFAULT},
    setting::{self, Setting},
    switch, variable,
};
use crate::exit::UsageError;
use clap::{
    Arg, Command,
    builder::Resettable,
    error::{ContextKind, ContextValue},
};
use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The last path of the search for the file.
const SYSTEM_FILE: &str = "/etc/tensor-relay/config.toml";

/// The maximum size of the file, far above that of a file with every option.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The commands, and their settings with the values of the file.
#[derive(Debug)]
pub(crate) struct Layers {
    command: Command,
    settings: Vec<Setting>,
    file: Option<PathBuf>,
}

impl Layers {
    /// Reads the file at `given`, or else the first one of [`search_paths`].
    ///
    /// # Errors
    /// When there is no file at `given`, or the file cannot be read or is invalid.
    pub(crate) fn find(command: Command, given: Option<&Path>) -> anyhow::Result<Self> {
        let mut layers = Self::without_file(command);
        if let Some((path, text)) = find_file(given)? {
            layers.add(path, &text)?;
        }
        Ok(layers)
    }

    /// The layers without a file: variables and defaults.
    pub(crate) fn without_file(command: Command) -> Self {
        let settings = setting::all(&command);
        Self { command, settings, file: None }
    }

    fn add(&mut self, path: PathBuf, text: &str) -> Result<(), UsageError> {
        let entries = file::parse(&path, text, &self.settings)?;
        for setting in &mut self.settings {
            let entry = |table: &str| entries.iter().find(|e| e.table == table && e.key == setting.key());
            if let Some(entry) = entry(setting.command()).or_else(|| entry(DEFAULT)) {
                setting.set(&entry.values, entry.line);
            }
        }
        self.file = Some(path);
        Ok(())
    }

    /// All settings, command by command.
    pub(crate) fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// The path of the file, if there is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The command with the file's values as defaults. `off` has the ids of the switches that flags turn off: the file
    /// and variables do not apply to them.
    pub(super) fn command(&self, off: &[String]) -> Command {
        switch::with_opposites(self.layered(self.command.clone(), None, off))
    }

    /// Replaces clap's error about the value of a variable, which names a flag that the user never typed, by one that
    /// names the variable.
    pub(super) fn explain(&self, error: clap::Error, command: Option<&str>) -> anyhow::Error {
        let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else {
            return error.into();
        };
        let holds = |setting: &&Setting| {
            let variable = variable::value_of(setting.variable());
            variable.is_some_and(|variable| variable.to_string_lossy().contains(value))
        };
        let settings = self.settings.iter().filter(|setting| Some(setting.command()) == command);
        let invalid = settings.filter(holds).find_map(|setting| setting.effective().err());
        invalid.map_or_else(|| error.into(), Into::into)
    }

    /// `command` and its subcommands, with the values of the layers for their arguments. `table` is its own table, which
    /// its subcommands share; `None` for the program itself.
    fn layered(&self, command: Command, table: Option<&str>, off: &[String]) -> Command {
        let command = command.mut_args(|arg| self.layered_arg(arg, table.unwrap_or_default(), off));
        command.mut_subcommands(|command| {
            let name = command.get_name().to_owned();
            self.layered(command, table.or(Some(&name)), off)
        })
    }

    fn layered_arg(&self, arg: Arg, table: &str, off: &[String]) -> Arg {
        let is_off = off.iter().any(|id| arg.get_id() == id.as_str());
        let arg = match arg.get_env().and_then(OsStr::to_str) {
            Some(name) if is_off || variable::value_of(name).is_none() => arg.env(Resettable::Reset),
            _ => arg,
        };
        match self.settings.iter().find(|setting| !is_off && setting.is(table, &arg)) {
            Some(setting) => setting.layered(arg),
            None => arg,
        }
    }
}

/// The path and content of the file at `given`, or else of the first file of [`search_paths`].
fn find_file(given: Option<&Path>) -> anyhow::Result<Option<(PathBuf, String)>> {
    if let Some(path) = given {
        return Ok(Some((path.into(), read(path)?)));
    }
    for path in search_paths(variable::value_of) {
        // Only a missing file is skipped: the user probably expects an unreadable one to be used.
        match path.try_exists() {
            Ok(false) => {}
            _ => return Ok(Some((path.clone(), read(&path)?))),
        }
    }
    Ok(None)
}

/// The paths at which the file is searched for, in order: in the XDG configuration directory, then in the system's.
pub(crate) fn search_paths(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let user = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let user = user.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".config")));
    let user = user.map(|dir| dir.join("tensor-relay/config.toml"));
    user.into_iter().chain([SYSTEM_FILE.into()]).collect()
}

fn read(path: &Path) -> Result<String, UsageError> {
    let mut text = String::new();
    let length =
        fs::File::open(path).and_then(|file| file.take(FILE_MAX_BYTES + 1).read_to_string(&mut text));
    let length = match length {
        Ok(length) if length as u64 > FILE_MAX_BYTES => {
            Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB"))
        }
        length => length,
    };
    length.map_err(|error| {
        UsageError(format!(
            "cannot read the configuration file {}: {error}; choose another one with --config",
            path.display()
        ))
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::{super::setting::Origin, *};

    #[test]
    fn effective_values_are_the_defaults_that_clap_uses() {
        let mut layers = Layers::without_file(variable::command());
        let text = "[default]\nconnect-timeout = 3\n[serve]\ntopic = ['a=b', 'c=d']\njson = true\n[list]\nticket = 't'";
        layers.add("c.toml".into(), text).unwrap();
        let mut set_count = 0;
        for setting in layers.settings() {
            let effective = setting.effective().unwrap();
            let command = layers.command(&[]);
            let command = command.find_subcommand(setting.command()).unwrap();
            let Some(arg) = command.get_arguments().find(|arg| setting.is(setting.command(), arg)) else {
                continue;
            };
            let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_str().unwrap()).collect();
            assert_eq!(defaults, effective.values, "{} {}", setting.command(), setting.key());
            set_count += usize::from(effective.origin != Origin::Default);
        }
        assert_eq!(set_count, 8, "connect-timeout five times, topic, json, ticket");
    }

    #[test]
    fn a_commands_own_table_overrides_the_default_table() {
        let mut layers = Layers::without_file(variable::command());
        layers
            .add("c.toml".into(), "[default]\njson = true\n[serve]\njson = false")
            .unwrap();
        let json = |command: &str| {
            let mut settings = layers.settings().iter();
            let setting = settings.find(|s| s.command() == command && s.key() == "json").unwrap();
            setting.effective().unwrap().origin
        };
        assert_eq!((json("serve"), json("list")), (Origin::File { line: 4 }, Origin::File { line: 2 }));
    }

    #[test]
    fn the_users_file_is_searched_for_before_the_systems() {
        let paths = |pairs: &[(&str, &str)]| {
            let found = search_paths(|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            });
            found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        let system = SYSTEM_FILE.to_owned();
        let both = paths(&[("XDG_CONFIG_HOME", "/x"), ("HOME", "/h")]);
        assert_eq!(both, ["/x/tensor-relay/config.toml".into(), system.clone()]);
        assert_eq!(paths(&[("HOME", "/h")]), ["/h/.config/tensor-relay/config.toml".into(), system.clone()]);
        assert_eq!(paths(&[]), [system]);
    }

    #[test]
    fn an_endless_file_is_refused() {
        assert!(
            read(Path::new("/dev/zero"))
                .unwrap_err()
                .to_string()
                .contains("longer than 1 MiB")
        );
        assert_eq!(read(Path::new("/dev/null")).unwrap(), "");
    }
}
