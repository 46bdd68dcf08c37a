//! The configuration file: TOML with a table for each command, validated completely.

use super::setting::Setting;
use crate::exit::UsageError;
use std::{
    borrow::Cow,
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};
use toml::{
    Spanned,
    de::{DeInteger, DeTable, DeValue},
};

/// The table for options shared by several commands.
pub(crate) const DEFAULT: &str = "default";

/// The minimum similarity of a misspelt name and a valid one, from 0 to 1, for suggesting the valid one.
const SIMILARITY_MIN: f64 = 0.7;

/// A validated configuration file.
#[derive(Debug)]
pub(crate) struct File {
    path: PathBuf,
    entries: Vec<Entry>,
}

/// One key of the file, with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// A command, or [`DEFAULT`].
    table: String,
    key: String,
    /// The values as command line arguments.
    pub(crate) values: Vec<String>,
    /// The line number, from 1.
    pub(crate) line: usize,
}

impl File {
    /// Parses `text`, the content of the file at `path`. All of it is validated, including the tables of other
    /// commands, so that mistakes are reported early.
    ///
    /// # Errors
    /// The first mistake, with file, line and key.
    pub(crate) fn parse(path: &Path, text: &str, settings: &[Setting]) -> Result<Self, UsageError> {
        let mut reader = Reader { path, text, settings, entries: vec![] };
        reader.read()?;
        Ok(Self { path: path.into(), entries: reader.entries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The entry for `setting`, from the command's own table or else from `[default]`.
    pub(crate) fn entry(&self, setting: &Setting) -> Option<&Entry> {
        let find = |table: &str| self.entries.iter().find(|e| e.table == table && e.key == setting.key());
        find(setting.command()).or_else(|| find(DEFAULT))
    }
}

/// The state of parsing one file.
struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    settings: &'a [Setting],
    entries: Vec<Entry>,
}

impl<'a> Reader<'a> {
    fn read(&mut self) -> Result<(), UsageError> {
        let document = DeTable::parse(self.text)
            .map_err(|error| self.error(&error.span().unwrap_or(0..0), error.message()))?;
        for (name, content) in in_order(document.get_ref()) {
            let Some(table) = content.get_ref().as_table() else {
                return Err(self.error(&name.span(), self.outside_tables(name.get_ref())));
            };
            if !self.tables().contains(&&**name.get_ref()) {
                return Err(self.error(&name.span(), self.unknown_table(name.get_ref())));
            }
            for (key, value) in in_order(table) {
                self.read_option(name.get_ref(), key, value)?;
            }
        }
        Ok(())
    }

    fn read_option(
        &mut self,
        table: &str,
        key: &Spanned<Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<(), UsageError> {
        let span = key.span();
        let setting = self.setting(table, key.get_ref()).map_err(|reason| self.error(&span, reason))?;
        let values = self.values(setting, key.get_ref(), value)?;
        let entry = Entry { table: table.into(), key: setting.key().into(), values, line: self.line(&span) };
        if let Some(first) = self.entries.iter().find(|e| e.table == entry.table && e.key == entry.key) {
            return Err(self.error(
                &span,
                format!("{key} is already given in line {}", first.line, key = key.get_ref()),
            ));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// The setting that `key` sets in `table`; in `[default]`, the first of the settings that share the key and the
    /// meaning.
    fn setting(&self, table: &str, key: &str) -> Result<&'a Setting, String> {
        let named: Vec<&Setting> = self.settings.iter().filter(|setting| setting.is_called(key)).collect();
        let of_table = named.iter().filter(|setting| table == DEFAULT || setting.command() == table);
        let of_table: Vec<&'a Setting> = of_table.copied().collect();
        match of_table.split_first() {
            None => Err(self.unknown_key(table, key, &named)),
            Some((first, others)) if others.iter().any(|other| !first.means_the_same_as(other)) => {
                Err(format!(
                    "{key} means different things to {}: put it into their tables",
                    joined(of_table.iter().map(|setting| setting.command()), " and ")
                ))
            }
            Some((first, _)) => Ok(*first),
        }
    }

    fn values(
        &self,
        setting: &Setting,
        key: &str,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<Vec<String>, UsageError> {
        let argument = |item: &Spanned<DeValue<'_>>, prefix: &str| {
            let scalar = scalar_argument(item.get_ref()).ok_or_else(|| {
                let kind = item.get_ref().type_str();
                self.error(
                    &item.span(),
                    format!("{key} requires {}, not a value of type {kind}", expected_value(setting)),
                )
            })?;
            let argument = format!("{prefix}{scalar}");
            setting.check(&argument).map_err(|reason| {
                let shown = if setting.is_secret() { "its value".into() } else { format!("{argument:?}") };
                self.error(&item.span(), format!("{key} cannot be {shown}: {reason}"))
            })?;
            Ok(argument)
        };
        match value.get_ref() {
            DeValue::Array(items) if setting.is_repeatable() => {
                items.iter().map(|item| argument(item, "")).collect()
            }
            DeValue::Table(pairs) if setting.accepts_pairs() => {
                let pairs = in_order(pairs).into_iter();
                pairs
                    .map(|(name, item)| argument(item, &format!("{}=", name.get_ref())))
                    .collect()
            }
            _ => Ok(vec![argument(value, "")?]),
        }
    }

    /// All valid names of tables.
    fn tables(&self) -> Vec<&'a str> {
        let mut tables = vec![DEFAULT];
        tables.extend(self.settings.iter().map(Setting::command));
        tables.dedup();
        tables
    }

    fn unknown_table(&self, name: &str) -> String {
        let tables = self.tables();
        match nearest(name, &tables) {
            Some(near) => format!("there is no table [{name}]; do you mean [{near}]?"),
            None => format!("there is no table [{name}]; there are [{}]", tables.join("], [")),
        }
    }

    fn outside_tables(&self, key: &str) -> String {
        let owner = self.settings.iter().find(|setting| setting.is_called(key));
        match owner {
            Some(owner) => {
                format!("{key} is outside of any table: put it into [{}] or [{DEFAULT}]", owner.command())
            }
            None if self.tables().contains(&key) => format!("{key} is a table: write [{key}]"),
            None => format!("{key} is outside of any table, and no command has an option of this name"),
        }
    }

    fn unknown_key(&self, table: &str, key: &str, elsewhere: &[&Setting]) -> String {
        if !elsewhere.is_empty() {
            let commands = elsewhere.iter().map(|setting| format!("[{}]", setting.command()));
            return format!("[{table}] has no option {key}; it belongs to {}", joined(commands, " and "));
        }
        let mut keys: Vec<&str> = vec![];
        for setting in self.settings.iter().filter(|s| table == DEFAULT || s.command() == table) {
            if !keys.contains(&setting.key()) {
                keys.push(setting.key());
            }
        }
        match nearest(&key.replace('_', "-"), &keys) {
            Some(near) => format!("[{table}] has no option {key}; do you mean {near}?"),
            None => format!("[{table}] has no option {key}; its options are {}", keys.join(", ")),
        }
    }

    fn error(&self, span: &Range<usize>, reason: impl fmt::Display) -> UsageError {
        UsageError(format!("{}:{}: {reason}", self.path.display(), self.line(span)))
    }

    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().iter().take(span.start);
        before.filter(|byte| **byte == b'\n').count() + 1
    }
}

/// The entries of a table in the order of the file; the parser sorts them by name.
fn in_order<'t, 'i>(table: &'t DeTable<'i>) -> Vec<(&'t Spanned<Cow<'i, str>>, &'t Spanned<DeValue<'i>>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// A scalar as a command line argument; `None` for other values.
fn scalar_argument(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.clone().into_owned()),
        DeValue::Integer(number) => decimal(number),
        DeValue::Float(number) => Some(number.as_str().into()),
        DeValue::Boolean(value) => Some(value.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn decimal(number: &DeInteger<'_>) -> Option<String> {
    i128::from_str_radix(number.as_str(), number.radix())
        .ok()
        .map(|number| number.to_string())
}

fn expected_value(setting: &Setting) -> &'static str {
    match (setting.accepts_pairs(), setting.is_repeatable()) {
        (true, _) => "NAME=VALUE strings or a table of them",
        (false, true) => "one value or an array",
        (false, false) => "one value",
    }
}

fn nearest<'k>(name: &str, candidates: &[&'k str]) -> Option<&'k str> {
    let scored = candidates
        .iter()
        .map(|candidate| (strsim::jaro_winkler(name, candidate), *candidate));
    let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.filter(|(score, _)| *score >= SIMILARITY_MIN)
        .map(|(_, candidate)| candidate)
}

fn joined<T: Into<String>>(parts: impl Iterator<Item = T>, separator: &str) -> String {
    parts.map(Into::into).collect::<Vec<String>>().join(separator)
}

#[cfg(test)]
mod tests {
    use super::super::{setting, variable};
    use super::*;

    fn parse(text: &str) -> Result<File, String> {
        let settings = setting::all(&variable::command());
        File::parse(Path::new("c.toml"), text, &settings).map_err(|error| error.0)
    }

    #[test]
    fn values_of_every_type_become_arguments() {
        let file = parse(
            "[serve]\nlisten = '[::1]:4747'\ngrace = 1_0\nchunk-size = 0x100\njson = true\n\
             topic = ['a=b', 'c=d']\nadvertise = 'x,y'\n[list]\nconnect_timeout = 2.5\n",
        )
        .unwrap();
        let entry = |table: &str, key: &str| {
            let entry = file.entries.iter().find(|e| e.table == table && e.key == key).unwrap();
            (entry.line, entry.values.join(" "))
        };
        assert_eq!(entry("serve", "listen"), (2, "[::1]:4747".into()));
        assert_eq!(entry("serve", "grace"), (3, "10".into()));
        assert_eq!(entry("serve", "chunk-size"), (4, "256".into()));
        assert_eq!(entry("serve", "json"), (5, "true".into()));
        assert_eq!(entry("serve", "topic"), (6, "a=b c=d".into()));
        assert_eq!(entry("serve", "advertise"), (7, "x,y".into()));
        assert_eq!(entry("list", "connect-timeout"), (9, "2.5".into()));
    }

    #[test]
    fn pairs_are_accepted_in_every_notation() {
        for text in [
            "[serve.topics]\na = 'b'\n'c/d' = 'e'",
            "[serve]\ntopics = { a = 'b', 'c/d' = 'e' }",
            "[serve]\ntopic.a = 'b'\ntopic.'c/d' = 'e'",
            "serve.topic = ['a=b', 'c/d=e']",
        ] {
            let file = parse(text).unwrap();
            assert_eq!(file.entries.len(), 1, "{text}");
            assert_eq!(file.entries[0].values, ["a=b", "c/d=e"], "{text}");
        }
    }

    #[test]
    fn errors_name_the_line_and_the_remedy() {
        for (text, message) in [
            ("[serve]\n\nlistne = 1", "c.toml:3: [serve] has no option listne; do you mean listen?"),
            ("[serve]\nzzz = 1", "c.toml:2: [serve] has no option zzz; its options are topic, all-files, "),
            ("[subscribe]\ngrace = 1", "c.toml:2: [subscribe] has no option grace; it belongs to [serve]"),
            ("[subscirbe]", "c.toml:1: there is no table [subscirbe]; do you mean [subscribe]?"),
            ("[demo-producer]", "there is no table [demo-producer]"),
            ("[config]\njson = true", "there is no table [config]"),
            ("grace = 1", "c.toml:1: grace is outside of any table: put it into [serve] or [default]"),
            ("bogus = 1", "no command has an option of this name"),
            ("serve = 1", "serve is a table: write [serve]"),
            ("[default]\ntopic = 'a'", "c.toml:2: topic means different things to serve and subscribe"),
            ("[serve]\nlisten = 'nowhere'", "c.toml:2: listen cannot be \"nowhere\": invalid socket address"),
            (
                "[default]\ncodec = 'lz4'",
                "c.toml:2: codec cannot be \"lz4\": write auto, raw, zstd, bitplanes, planes or sparse",
            ),
            (
                "[serve]\nlisten = ['a', 'b']",
                "c.toml:2: listen requires one value, not a value of type array",
            ),
            ("[serve.listen]\nip = 'b'", "listen requires one value, not a value of type table"),
            ("[serve]\ntopic = [\n'a=b',\n'../c=d']", "c.toml:4: topic cannot be"),
            ("[serve.topics]\na = ''", "c.toml:2: topics cannot be \"a=\": no file is given"),
            ("[serve]\ngrace = 1979-05-27", "grace requires one value, not a value of type datetime"),
            ("[serve]\nstate-dir='a'\nstate_dir='b'", "c.toml:3: state_dir is already given in line 2"),
            ("[serve]\ngrace =\n", "c.toml:2: "),
            ("[serve]\ngrace = 1\ngrace = 2\n", "c.toml:3: duplicate key"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(message), "{text:?}\n{error}\n{message}");
        }
    }

    #[test]
    fn a_commands_own_table_overrides_the_default_table() {
        let file = parse("[default]\njson = true\n[serve]\njson = false").unwrap();
        let settings = setting::all(&variable::command());
        let json = |command: &str| {
            let setting = settings.iter().find(|s| s.command() == command && s.key() == "json").unwrap();
            file.entry(setting).unwrap().line
        };
        assert_eq!((json("serve"), json("list")), (4, 2));
    }
}
