//! [`AccessStore`]: the access files, in the folder `access` of a server's state directory.
//!
//! | file | content |
//! |---|---|
//! | `secrets` | the secrets that seal tickets, one per line; the first seals new ones. Any reader of it can make tickets |
//! | `issued` | the issued tickets, one per line |
//! | `revoked` | the revoked tickets, one per line |
//! | `used` | when each ticket was last used |
//! | `keys` | the trusted keys of clients, one per line: `sha256:… NAME`; and revoked ones: `revoked sha256:…` |
//! | `ca.pem` | the authorities whose certificates name clients |
//! | `acl` | the access control list, an [`Acl`](super::Acl) |
//!
//! Any may be missing; without `secrets`, no ticket is valid. A running server opens those that define the rules by name
//! every two seconds, so a file may be replaced in any way, also by Kubernetes' exchange of a link.

use super::{
    Access, AccessStoreError, Rules,
    folder::Folder,
    issued::{self, IssuedTicket},
    reload::{self, Reading},
    seconds_now,
    texts::{self, FILES, KeyLine, Texts, revoked_ticket},
};
use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};
use tensor_relay_protocol::{Claims, Grant, Secret, SecretId, TicketId, Token, Verb};
use tensor_relay_transport::Fingerprint;
use tokio::sync::watch;

/// The number of secrets that a rotation leaves valid: the new one and the previous one.
const SECRETS_MAX: usize = 2;

/// The maximum number of listed tickets; a line has a few hundred bytes.
const ISSUED_MAX: usize = 20_000;

/// The maximum number of tickets whose last use is stored; those used longest ago are dropped.
pub(super) const USES_MAX: usize = 10_000;

/// The folder `access` of a state directory.
#[derive(Debug, Clone)]
pub struct AccessStore {
    folder: Folder,
    admits_everybody: bool,
}

impl AccessStore {
    /// Opens the files below `state_dir`, and creates a secret if there is none: for a server. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they cannot be written or read.
    pub fn open(state_dir: &Path) -> Result<Self, AccessStoreError> {
        let store = Self::existing(state_dir);
        if store.folder.read("secrets")?.is_none() {
            if store.has_made_tickets() {
                tracing::warn!(
                    "{} was missing, so a new secret is made: tickets made before are no longer valid.",
                    store.folder.path("secrets").display()
                );
            }
            // Not the number of a lost one, by which its tickets are listed.
            let lost = store.issued().unwrap_or_default();
            let last = lost.iter().filter_map(|ticket| ticket.secret).max_by_key(|id| id.0);
            store.folder.make()?;
            store.folder.change("secrets", |lines| {
                if lines.is_empty() {
                    lines.push(new_secret(last).to_line()); // Of two concurrent starts, both use the first secret.
                }
                Ok(())
            })?;
        }
        store.secrets().map(|_| store)
    }

    /// The files below `state_dir` as they are, also without a secret: to read and to change rules. Blocks.
    pub fn existing(state_dir: &Path) -> Self {
        let store = Self { folder: Folder::new(state_dir.join("access")), admits_everybody: false };
        store.folder.warn_if_exposed(&[&FILES[..], &["issued", "used"]].concat());
        store
    }

    /// With rules that admit everybody: of the files, only the lines of the access control list for users of the publish
    /// socket then have an effect.
    #[must_use]
    pub fn admitting_everybody(self) -> Self {
        Self { admits_everybody: true, ..self }
    }

    /// Whether tickets were made, used or revoked here.
    pub fn has_made_tickets(&self) -> bool {
        ["issued", "used", "revoked"].iter().any(|file| self.folder.path(file).exists())
    }

    /// The error of a store without a secret, of which no ticket is valid. Blocks.
    pub fn lost_secret(&self) -> Option<AccessStoreError> {
        self.secrets().err()
    }

    /// Reads the rules. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when a file cannot be read or is invalid.
    pub fn rules(&self) -> Result<Rules, AccessStoreError> {
        self.rules_of(&Texts::read(&self.folder)?)
    }

    fn rules_of(&self, texts: &Texts) -> Result<Rules, AccessStoreError> {
        Ok(Rules { open: self.admits_everybody, ..texts.rules(&self.folder)? })
    }

    /// Why a running server would refuse files as they are now: what it read from them before then stays in force,
    /// except what they revoke. Blocks.
    pub fn refused(&self) -> Vec<AccessStoreError> {
        Texts::default().follow(&self.folder)
    }

    /// An [`Access`] by these files: a task of the current runtime reads them until the last clone is dropped. If one
    /// becomes invalid, its previous content stays in force; the log and [`Access::problem`] have the reason.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they are invalid now.
    pub fn watch_changes(&self) -> Result<Access, AccessStoreError> {
        let texts = Texts::read(&self.folder)?;
        let sender = watch::Sender::new(Arc::new(self.rules_of(&texts)?));
        let access = Access::following(sender.subscribe());
        let (uses, problem) = (Arc::downgrade(&access.uses), Arc::clone(&access.problem));
        let store = self.clone();
        let check =
            move |before: Texts, used: Option<&HashMap<TicketId, u64>>| store.check_files(before, used);
        tokio::spawn(reload::follow_files(check, texts, sender, uses, problem));
        Ok(access)
    }

    /// One check by a running server, whose current rules are from `texts`. Saves `used`, the times at which tickets
    /// were used, if there is any new one.
    fn check_files(&self, mut texts: Texts, used: Option<&HashMap<TicketId, u64>>) -> Reading {
        let saved = used.map_or(Ok(()), |used| self.note_uses(used));
        let refused = texts.follow(&self.folder);
        Reading { rules: self.rules_of(&texts), texts, refused, saved }
    }

    /// Seals `claims` without listing them: for tickets that are made at each start.
    ///
    /// # Errors
    /// [`AccessStoreError`] when there is no secret.
    pub fn seal(&self, claims: &Claims) -> Result<Token, AccessStoreError> {
        let secrets = self.secrets()?;
        let secret = secrets
            .first()
            .ok_or_else(|| self.folder.content_error("secrets", &"it has no secret"))?;
        Ok(secret.seal(claims))
    }

    /// Issues a ticket to `holder` and lists it; returns its claims and its token.
    ///
    /// # Errors
    /// [`AccessStoreError::Unfit`] if a ticket cannot represent this; others if it cannot be listed.
    pub fn issue(
        &self,
        holder: &str,
        grants: Vec<Grant>,
        valid_for: Option<Duration>,
    ) -> Result<(Claims, Token), AccessStoreError> {
        if holder.chars().any(char::is_control) {
            return Err(AccessStoreError::Unfit("the name of its holder has control characters"));
        }
        if grants.iter().any(|grant| grant.verbs.contains(Verb::Publish)) {
            return Err(AccessStoreError::Unfit(
                "a ticket cannot grant `publish`: lines `uid:NUMBER publish TOPICS` of the access control list grant it \
                 to users of the publish socket",
            ));
        }
        let issued_s = seconds_now();
        let expires_s = valid_for.map(|valid| issued_s.saturating_add(valid.as_secs().max(1)));
        let claims = Claims { id: TicketId(rand::random()), holder: holder.to_owned(), expires_s, grants };
        let secret = self.secrets()?.swap_remove(0);
        let token = secret.seal(&claims);
        if Token::new(token.as_str()).is_err() || token.decode_unverified().is_err() {
            return Err(AccessStoreError::Unfit(
                "it has more topics, or a longer name, than a ticket can hold: write fewer globs that match more",
            ));
        }
        let issued = IssuedTicket { claims: claims.clone(), issued_s, secret: Some(secret.id()) };
        self.folder.change("issued", |lines| {
            make_room(lines, issued_s)?;
            lines.push(issued::to_line(&issued));
            Ok(())
        })?;
        Ok((claims, token))
    }

    /// The issued tickets, oldest first.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they cannot be read.
    pub fn issued(&self) -> Result<Vec<IssuedTicket>, AccessStoreError> {
        self.read_lines("issued", issued::from_line)
    }

    /// When each ticket was last used, in seconds since 1970. Running servers save changes every two seconds.
    ///
    /// # Errors
    /// [`AccessStoreError`] when the file cannot be read.
    pub fn used(&self) -> Result<HashMap<TicketId, u64>, AccessStoreError> {
        Ok(self.read_lines("used", parse_use)?.into_iter().collect())
    }

    /// Revokes a ticket; servers notice within two seconds and end its sessions. Returns false if it was revoked
    /// before.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn revoke(&self, id: TicketId) -> Result<bool, AccessStoreError> {
        self.folder.make()?;
        self.folder.change("revoked", |lines| {
            let is_new = lines.iter().all(|line| revoked_ticket(line) != Some(id));
            if is_new {
                lines.push(id.to_string());
            }
            Ok(is_new)
        })
    }

    /// Admits clients that hold `key`, under `name` in the access control list. A listed key gets the new name.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written, or when the last line of the file may be truncated.
    pub fn trust(&self, key: Fingerprint, name: &str) -> Result<(), AccessStoreError> {
        self.folder.make()?;
        self.folder.change("keys", |lines| {
            remove_key(lines, key);
            lines.push(format!("{key} {name}"));
            Ok(())
        })
    }

    /// Revokes the keys with this name or fingerprint: they are refused even with a valid token. Returns whether there
    /// were any.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn distrust(&self, name: &str) -> Result<bool, AccessStoreError> {
        self.folder.change("keys", |lines| {
            let matching = |line: &String| match KeyLine::parse(line)? {
                KeyLine::Trusted(key, key_name) => {
                    (key.to_string() == name || key_name == name).then_some(key)
                }
                KeyLine::Revoked(_) => None,
            };
            let keys: Vec<_> = lines.iter().filter_map(matching).collect();
            for key in &keys {
                remove_key(lines, *key);
                // Before a last line that may be truncated, which stays so: a running server does not follow it.
                lines.insert(lines.len().saturating_sub(1), format!("revoked {key}"));
            }
            Ok(!keys.is_empty())
        })
    }

    /// Creates a new secret. Tickets of the previous one stay valid until the next rotation; older ones become invalid
    /// now.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn rotate(&self) -> Result<(), AccessStoreError> {
        self.folder.change("secrets", |lines| {
            let mut secrets = texts::secrets(&self.folder, &lines.join("\n"))?;
            secrets.insert(0, new_secret(secrets.first().map(Secret::id)));
            secrets.truncate(SECRETS_MAX);
            *lines = secrets.iter().map(Secret::to_line).collect();
            Ok(())
        })
    }

    /// Saves the times at which tickets were used, merged with those that other servers of this folder saved.
    fn note_uses(&self, uses: &HashMap<TicketId, u64>) -> Result<(), AccessStoreError> {
        self.folder.change("used", |lines| {
            // Invalid lines are dropped: they are only informative.
            let mut merged: HashMap<_, _> = lines.iter().filter_map(|line| parse_use(line)).collect();
            for (id, used_s) in uses {
                let last_used_s = merged.entry(*id).or_default();
                *last_used_s = (*last_used_s).max(*used_s);
            }
            if merged.len() > USES_MAX {
                let mut times: Vec<u64> = merged.values().copied().collect();
                let (_, oldest, _) = times.select_nth_unstable(merged.len() - USES_MAX);
                let oldest = *oldest;
                merged.retain(|_, used_s| *used_s >= oldest);
            }
            *lines = merged.iter().map(|(id, used_s)| format!("{id} {used_s}")).collect();
            Ok(())
        })
    }

    fn secrets(&self) -> Result<Vec<Secret>, AccessStoreError> {
        texts::secrets(&self.folder, &self.folder.read("secrets")?.unwrap_or_default())
    }

    fn read_lines<T>(
        &self,
        file: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, AccessStoreError> {
        self.folder
            .parse_lines(file, &self.folder.read(file)?.unwrap_or_default(), parse)
    }
}

/// Removes expired tickets from the list of issued ones if it is full.
fn make_room(lines: &mut Vec<String>, now_s: u64) -> Result<(), AccessStoreError> {
    if lines.len() < ISSUED_MAX {
        return Ok(());
    }
    let is_valid = |claims: &Claims| claims.expires_s.is_none_or(|expires_s| expires_s > now_s);
    lines.retain(|line| issued::from_line(line).is_some_and(|ticket| is_valid(&ticket.claims)));
    match lines.len() < ISSUED_MAX {
        true => Ok(()),
        false => Err(AccessStoreError::Unfit(
            "the list is full of valid tickets: remove the lines of revoked ones from access/issued",
        )),
    }
}

/// Removes the lines of `key` from those of `keys`.
fn remove_key(lines: &mut Vec<String>, key: Fingerprint) {
    lines.retain(|line| KeyLine::parse(line).is_none_or(|line| line.key() != key));
}

/// A line of `used`.
fn parse_use(line: &str) -> Option<(TicketId, u64)> {
    let (id, used_s) = line.split_once(' ')?;
    Some((id.parse().ok()?, used_s.parse().ok()?))
}

/// A new secret, with the number after `before`.
fn new_secret(before: Option<SecretId>) -> Secret {
    let number = before.map_or(1, |id| id.0.wrapping_add(1));
    Secret::new(SecretId(number), rand::random())
}

#[cfg(test)]
mod tests;
