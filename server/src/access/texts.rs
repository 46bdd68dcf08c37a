//! [`Texts`]: the texts of the access files, as read in one check.

use super::{AccessStoreError, Rules, folder::Folder};
use std::collections::HashMap;
use tensor_relay_protocol::{Secret, TicketId};
use tensor_relay_transport::{ClientAuthorities, Fingerprint};

/// The files that define the rules.
pub(super) const FILES: [&str; 5] = ["secrets", "revoked", "keys", "ca.pem", "acl"];

/// The text of each of [`FILES`]; empty for a missing file.
#[derive(Debug, Clone, Default)]
pub(super) struct Texts(HashMap<&'static str, String>);

/// A line of `keys`.
pub(super) enum KeyLine {
    /// A client's key and its name.
    Trusted(Fingerprint, String),
    /// A revoked key, which is refused even with a valid token.
    Revoked(Fingerprint),
}

impl KeyLine {
    pub(super) fn parse(line: &str) -> Option<Self> {
        match line.trim().split_once(' ')? {
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
        let read = |file| Ok((file, folder.read(file)?.unwrap_or_default()));
        Ok(Self(FILES.into_iter().map(read).collect::<Result<_, _>>()?))
    }

    fn text(&self, file: &str) -> &str {
        self.0.get(file).map_or("", String::as_str)
    }

    /// Refuses files that look lost or truncated since `before`: a running server keeps its rules.
    ///
    /// # Errors
    /// [`AccessStoreError::Content`], with what to do if the change was intended.
    pub(super) fn check_after(&self, before: &Self, folder: &Folder) -> Result<(), AccessStoreError> {
        for file in FILES {
            let (then, now) = (before.text(file), self.text(file));
            if now.trim().is_empty() && !then.trim().is_empty() {
                let why = "it is missing or empty and was not before; if it is meant to be empty, write a line that \
                           begins with `#`, or restart the server";
                return Err(folder.content_error(file, &why));
            }
            let has_names = matches!(file, "keys" | "acl"); // The other files become invalid if truncated.
            if has_names && now != then && !now.is_empty() && !now.ends_with('\n') {
                let why = "its last line has no line end, so it may be truncated: add one";
                return Err(folder.content_error(file, &why));
            }
        }
        Ok(())
    }

    pub(super) fn rules(&self, folder: &Folder) -> Result<Rules, AccessStoreError> {
        let (mut keys, mut revoked_keys) = (HashMap::new(), std::collections::HashSet::new());
        for line in folder.parse_lines("keys", self.text("keys"), KeyLine::parse)? {
            match line {
                KeyLine::Trusted(key, name) => drop(keys.insert(key, name)),
                KeyLine::Revoked(key) => drop(revoked_keys.insert(key)),
            }
        }
        let pem = self.text("ca.pem");
        let is_blank = pem.lines().all(|line| line.trim().is_empty() || line.starts_with('#'));
        let authorities = match is_blank {
            true => ClientAuthorities::default(),
            false => ClientAuthorities::from_pem(pem).map_err(|why| folder.content_error("ca.pem", &why))?,
        };
        Ok(Rules {
            open: false,
            secrets: secrets(folder, self.text("secrets"))?,
            revoked: revoked(folder, self.text("revoked"))?.into_iter().collect(),
            keys,
            revoked_keys,
            authorities,
            acl: self.text("acl").parse().map_err(|why| folder.content_error("acl", &why))?,
        })
    }
}

pub(super) fn revoked(folder: &Folder, text: &str) -> Result<Vec<TicketId>, AccessStoreError> {
    folder.parse_lines("revoked", text, |line| line.parse().ok())
}

pub(super) fn secrets(folder: &Folder, text: &str) -> Result<Vec<Secret>, AccessStoreError> {
    let secrets = folder.parse_lines("secrets", text, |line| Secret::from_line(line).ok())?;
    match secrets.is_empty() {
        true => {
            let why = "it is missing or has no secret; a server creates one at its first start";
            Err(folder.content_error("secrets", &why))
        }
        false => Ok(secrets),
    }
}
