//! The configuration file: TOML with a table for each command, validated completely.

use super::setting::Setting;
use crate::exit::UsageError;
use std::{borrow::Cow, fmt, ops::Range, path::Path};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// The table for options shared by several commands.
pub(crate) const DEFAULT: &str = "default";

/// The minimum similarity of a misspelt name and a valid one, from 0 to 1, for suggesting the valid one.
const SIMILARITY_MIN: f64 = 0.7;

/// One key of the file, with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// A command, or [`DEFAULT`].
    pub(super) table: String,
    pub(super) key: String,
    /// The values as command line arguments.
    pub(super) values: Vec<String>,
    /// The line number, from 1.
    pub(super) line: usize,
}

/// Parses `text`, the content of the file at `path`. All of it is validated, including the tables of other commands, so
/// that mistakes are reported early.
///
/// # Errors
/// The first mistake, with file, line and key.
pub(super) fn parse(path: &Path, text: &str, settings: &[Setting]) -> Result<Vec<Entry>, UsageError> {
    let mut reader = Reader { path, text, settings, entries: vec![] };
    reader.read()?;
    Ok(reader.entries)
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
            let (table, known) = (name.get_ref(), self.tables());
            let content = content.get_ref().as_table();
            let Some(content) = content.filter(|_| known.contains(&&**table)) else {
                let reason = match content.is_some() {
                    true => format!("there is no table [{table}]; {}", meant(table, &known)),
                    false => format!(
                        "{table} is outside of any table: put it into that of its command, or [{DEFAULT}]"
                    ),
                };
                return Err(self.error(&name.span(), reason));
            };
            for (key, value) in in_order(content) {
                self.read_option(table, key, value)?;
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
            let reason = format!("{} is already given in line {}", key.get_ref(), first.line);
            return Err(self.error(&span, reason));
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
        let commands = |settings: &[&Setting]| {
            settings
                .iter()
                .map(|setting| setting.command())
                .collect::<Vec<_>>()
                .join(" and ")
        };
        match of_table.split_first() {
            None if !named.is_empty() => {
                Err(format!("[{table}] has no option {key}; it belongs to {}", commands(&named)))
            }
            None => Err(self.unknown_key(table, key)),
            Some((first, others)) if others.iter().any(|other| !first.means_the_same_as(other)) => {
                let commands = commands(&of_table);
                Err(format!("{key} means different things to {commands}: put it into their tables"))
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
            let error = |reason: String| self.error(&item.span(), format!("{key} {reason}"));
            let scalar = scalar_argument(item.get_ref()).ok_or_else(|| {
                let (wanted, kind) = (expected_value(setting), item.get_ref().type_str());
                error(format!("requires {wanted}, not a value of type {kind}"))
            })?;
            let argument = format!("{prefix}{scalar}");
            setting.check(&argument).map_err(|reason| {
                let shown = if setting.is_secret() { "its value".into() } else { format!("{argument:?}") };
                error(format!("cannot be {shown}: {reason}"))
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

    fn unknown_key(&self, table: &str, key: &str) -> String {
        let of_table = self.settings.iter().filter(|s| table == DEFAULT || s.command() == table);
        let mut keys: Vec<&str> = of_table.map(Setting::key).collect();
        keys.sort_unstable();
        keys.dedup();
        format!("[{table}] has no option {key}; {}", meant(&key.replace('_', "-"), &keys))
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
        DeValue::Integer(number) => {
            Some(i128::from_str_radix(number.as_str(), number.radix()).ok()?.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().into()),
        DeValue::Boolean(value) => Some(value.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn expected_value(setting: &Setting) -> &'static str {
    match (setting.accepts_pairs(), setting.is_repeatable()) {
        (true, _) => "NAME=VALUE strings or a table of them",
        (false, true) => "one value or an array",
        (false, false) => "one value",
    }
}

/// What `name` probably means: the nearest of `known`, or any of them.
fn meant(name: &str, known: &[&str]) -> String {
    let scored = known.iter().map(|known| (strsim::jaro_winkler(name, known), known));
    match scored.max_by(|(a, _), (b, _)| a.total_cmp(b)) {
        Some((score, nearest)) if score >= SIMILARITY_MIN => format!("do you mean {nearest}?"),
        _ => format!("there are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{setting, variable},
        *,
    };

    fn parse(text: &str) -> Result<Vec<Entry>, String> {
        let settings = setting::all(&variable::command());
        super::parse(Path::new("c.toml"), text, &settings).map_err(|error| error.0)
    }

    #[test]
    fn values_of_every_type_become_arguments() {
        let entries = parse(
            "[serve]\nlisten = '[::1]:4747'\ngrace = 1_0\nchunk-size = 0x100\njson = true\n\
             topic = ['a=b', 'c=d']\nadvertise = 'x,y'\n[list]\nconnect_timeout = 2.5\n",
        )
        .unwrap();
        let entry = |table: &str, key: &str| {
            let entry = entries.iter().find(|e| e.table == table && e.key == key).unwrap();
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
            let entries = parse(text).unwrap();
            assert_eq!(entries.len(), 1, "{text}");
            assert_eq!(entries[0].values, ["a=b", "c/d=e"], "{text}");
        }
    }

    #[test]
    fn errors_name_the_line_and_the_remedy() {
        for (text, message) in [
            ("[serve]\n\nlistne = 1", "c.toml:3: [serve] has no option listne; do you mean listen?"),
            ("[serve]\nzzz = 1", "c.toml:2: [serve] has no option zzz; there are admin, admin-token-file, "),
            ("[subscribe]\ngrace = 1", "c.toml:2: [subscribe] has no option grace; it belongs to serve"),
            ("[subscirbe]", "c.toml:1: there is no table [subscirbe]; do you mean subscribe?"),
            ("[zzz]", "there is no table [zzz]; there are default, serve, publish, "),
            ("[config]\njson = true", "there is no table [config]"),
            (
                "grace = 1",
                "c.toml:1: grace is outside of any table: put it into that of its command, or [default]",
            ),
            (
                "[default]\ntopic = 'a'",
                "c.toml:2: topic means different things to serve and relay and subscribe",
            ),
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
}
