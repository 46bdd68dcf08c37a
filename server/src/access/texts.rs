//! [`Texts`]: the texts of the access files, as read in one check.

use super::{
    AccessStoreError, Rules,
    folder::{Folder, UNFINISHED, has_names, unfinished_line},
};
use std::collections::{HashMap, HashSet};
use tensor_relay_protocol::{Secret, TicketId};
use tensor_relay_transport::{ClientAuthorities, Fingerprint};

/// The files that define the rules.
pub(super) const FILES: [&str; 5] = ["secrets", "revoked", "keys", "ca.pem", "acl"];

/// The text of each of [`FILES`] that was there.
#[derive(Debug, Clone, Default)]
pub(super) struct Texts(HashMap<&'static str, String>);

/// A line of `keys`.
pub(super) enum KeyLine {
    /// A client's key and its name.
    Trusted(Fingerprint, String),
    /// A revoked key, which is refused even with a valid token.
    Revoked(Fingerprint),
}

/// `line` without a comment: from a `#` on that begins the line or follows a space.
fn without_comment(line: &str) -> &str {
    let is_comment = |at: &usize| line[..*at].chars().next_back().is_none_or(char::is_whitespace);
    let end = line.match_indices('#').map(|(at, _)| at).find(is_comment);
    line[..end.unwrap_or(line.len())].trim()
}

/// The ticket of a line of `revoked`.
pub(super) fn revoked_ticket(line: &str) -> Option<TicketId> {
    without_comment(line).parse().ok()
}

impl KeyLine {
    pub(super) fn parse(line: &str) -> Option<Self> {
        match without_comment(line).split_once(' ')? {
            ("revoked", key) => Some(Self::Revoked(key.trim().parse().ok()?)),
            (key, name) => Some(Self::Trusted(key.parse().ok()?, name.trim().to_owned())),
        }
    }

    pub(super) fn key(&self) -> Fingerprint {
        match self {
            Self::Trusted(key, _) | Self::Revoked(key) => *key,
        }
    }
}

impl Texts {
    pub(super) fn read(folder: &Folder) -> Result<Self, AccessStoreError> {
        let read = |file| Ok(folder.read(file)?.map(|text| (file, text)));
        Ok(Self(
            FILES
                .into_iter()
                .filter_map(|file| read(file).transpose())
                .collect::<Result<_, _>>()?,
        ))
    }

    fn text(&self, file: &str) -> &str {
        self.0.get(file).map_or("", String::as_str)
    }

    /// Reads the files again, for a running server. A file that is refused keeps its last text, and what it revokes is
    /// added to that; the other files are followed. Returns why files are refused.
    pub(super) fn follow(&mut self, folder: &Folder) -> Vec<AccessStoreError> {
        FILES
            .into_iter()
            .filter_map(|file| self.follow_file(file, folder).err())
            .collect()
    }

    fn follow_file(&mut self, file: &'static str, folder: &Folder) -> Result<(), AccessStoreError> {
        let (before, now) = (self.text(file), folder.read(file)?.unwrap_or_default());
        if now == before {
            return Ok(());
        }
        let checked = check_whole(file, before, &now, folder)
            .and_then(|()| add(&mut Rules::default(), file, &now, folder));
        let text = match checked {
            Ok(()) => now,
            Err(_) => with_revocations(file, before, &now),
        };
        self.0.insert(file, text);
        checked
    }

    pub(super) fn rules(&self, folder: &Folder) -> Result<Rules, AccessStoreError> {
        let mut rules = Rules::default();
        let mut texts = FILES.into_iter().filter_map(|file| Some((file, self.0.get(file)?)));
        texts.try_for_each(|(file, text)| add(&mut rules, file, text, folder))?;
        Ok(rules)
    }
}

/// Refuses the text of a file that looks lost or truncated after `before`.
///
/// # Errors
/// [`AccessStoreError::Content`], with what to do if the change was intended.
fn check_whole(file: &str, before: &str, now: &str, folder: &Folder) -> Result<(), AccessStoreError> {
    if now.trim().is_empty() && !before.trim().is_empty() {
        let why = "it is missing or empty and was not before; if it is meant to be empty, write a line that begins \
                   with `#`, or restart the server";
        return Err(folder.content_error(file, &why));
    }
    if has_names(file) && unfinished_line(now).is_some() {
        return Err(folder.content_error(file, &UNFINISHED));
    }
    Ok(())
}

/// `before`, with those lines of the refused text `now` that revoke a ticket or a key: they have a fixed length, so a
/// truncated line is none of them.
fn with_revocations(file: &str, before: &str, now: &str) -> String {
    let revokes = |line: &str| match file {
        "revoked" => revoked_ticket(line).is_some(),
        "keys" => matches!(KeyLine::parse(line), Some(KeyLine::Revoked(_))),
        _ => false,
    };
    let known: HashSet<&str> = before.lines().collect();
    let new = now.lines().map(str::trim).filter(|line| revokes(line) && !known.contains(line));
    new.fold(before.to_owned(), |text, line| {
        let text = if text.is_empty() || text.ends_with('\n') { text } else { text + "\n" };
        text + line + "\n"
    })
}

/// Adds what `file` with the given `text` defines to `rules`.
fn add(rules: &mut Rules, file: &str, text: &str, folder: &Folder) -> Result<(), AccessStoreError> {
    match file {
        "secrets" => rules.secrets = secrets(folder, text)?,
        "revoked" => rules.revoked = revoked(folder, text)?.into_iter().collect(),
        "keys" => {
            for line in folder.parse_lines(file, text, KeyLine::parse)? {
                match line {
                    KeyLine::Trusted(key, name) => drop(rules.keys.insert(key, name)),
                    KeyLine::Revoked(key) => drop(rules.revoked_keys.insert(key)),
                }
            }
        }
        "ca.pem" => {
            let is_blank = text.lines().all(|line| line.trim().is_empty() || line.starts_with('#'));
            if !is_blank {
                let authorities = ClientAuthorities::from_pem(text);
                rules.authorities = authorities.map_err(|why| folder.content_error(file, &why))?;
            }
        }
        _ => rules.acl = text.parse().map_err(|why| folder.content_error(file, &why))?,
    }
    Ok(())
}

pub(super) fn revoked(folder: &Folder, text: &str) -> Result<Vec<TicketId>, AccessStoreError> {
    folder.parse_lines("revoked", text, revoked_ticket)
}

pub(super) fn secrets(folder: &Folder, text: &str) -> Result<Vec<Secret>, AccessStoreError> {
    let secrets = folder.parse_lines("secrets", text, |line| Secret::from_line(line).ok())?;
    match secrets.is_empty() {
        true => {
            let why = "it is missing or has no secret, so no ticket is valid: restore it; otherwise the next start of \
                       `serve` makes a new one, for new tickets";
            Err(folder.content_error("secrets", &why))
        }
        false => Ok(secrets),
    }
}
