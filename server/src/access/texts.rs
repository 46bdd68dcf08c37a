//! The texts of the files that rule access, as they were read at one moment.

use super::{AccessStoreError, Rules, folder::Folder};
use std::collections::HashMap;
use tensor_relay_protocol::{Secret, TicketId};
use tensor_relay_transport::{ClientAuthorities, Fingerprint};

/// The files that rules are made of.
pub(super) const FILES: [&str; 5] = ["secrets", "revoked", "keys", "ca.pem", "acl"];

/// What each of [`FILES`] holds; a file that is missing holds nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Texts(HashMap<&'static str, String>);

/// A line of `keys`.
pub(super) enum KeyLine {
    /// A client's key, and what it is called.
    Trusted(Fingerprint, String),
    /// A key that lets nobody in any more, with whatever token beside it.
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

    fn of(&self, file: &str) -> &str {
        self.0.get(file).map_or("", String::as_str)
    }

    /// Refuses files that look as if they had been lost or cut short since `before`: a running server keeps what it had.
    ///
    /// # Errors
    /// [`AccessStoreError::Content`] with what to do where it was meant.
    pub(super) fn check_after(&self, before: &Self, folder: &Folder) -> Result<(), AccessStoreError> {
        for file in FILES {
            let (then, now) = (before.of(file), self.of(file));
            if now.trim().is_empty() && !then.trim().is_empty() {
                let why = "it is missing or empty and was not before; where it is meant to say nothing, write a line that \
                           begins with `#`, or restart the server";
                return Err(folder.wrong(file, &why));
            }
            let has_names = matches!(file, "keys" | "acl"); // The other files show by themselves that they were cut.
            if has_names && now != then && !now.is_empty() && !now.ends_with('\n') {
                let why = "its last line has no line end, so it may be cut short: end it with one";
                return Err(folder.wrong(file, &why));
            }
        }
        Ok(())
    }

    pub(super) fn rules(&self, folder: &Folder) -> Result<Rules, AccessStoreError> {
        let (mut keys, mut revoked_keys) = (HashMap::new(), std::collections::HashSet::new());
        for line in folder.parse_lines("keys", self.of("keys"), KeyLine::parse)? {
            match line {
                KeyLine::Trusted(key, name) => drop(keys.insert(key, name)),
                KeyLine::Revoked(key) => drop(revoked_keys.insert(key)),
            }
        }
        let pem = self.of("ca.pem");
        let says_nothing = pem.lines().all(|line| line.trim().is_empty() || line.starts_with('#'));
        let authorities = match says_nothing {
            true => ClientAuthorities::default(),
            false => ClientAuthorities::from_pem(pem).map_err(|why| folder.wrong("ca.pem", &why))?,
        };
        Ok(Rules {
            open: false,
            secrets: secrets(folder, self.of("secrets"))?,
            revoked: revoked(folder, self.of("revoked"))?.into_iter().collect(),
            keys,
            revoked_keys,
            authorities,
            acl: self.of("acl").parse().map_err(|why| folder.wrong("acl", &why))?,
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
            let why = "it is missing or holds no secret; a server makes one at its first start";
            Err(folder.wrong("secrets", &why))
        }
        false => Ok(secrets),
    }
}
