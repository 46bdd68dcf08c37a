//! The access files, in the folder `access` of a server's state directory.
//!
//! | file | what it holds |
//! |---|---|
//! | `secrets` | the secrets that seal tickets, one a line; the first seals new ones. Whoever reads it can make tickets |
//! | `issued` | the tickets that were made by hand, one a line |
//! | `revoked` | the tickets that are not valid any more, one a line |
//! | `used` | when each ticket was used last |
//! | `keys` | the keys of clients, `sha256:… NAME` a line, and those that were revoked, `revoked sha256:…` |
//! | `ca.pem` | the authorities whose clients are known by the names in their certificates |
//! | `acl` | what they may do, as [`Acl`](super::Acl) has it |
//!
//! All but `secrets` may be missing. A running server looks at them every two seconds, by name, so that a file may be
//! replaced however one likes, Kubernetes' exchange of a link included.

use super::{
    Access, AccessStoreError, Rules,
    folder::Folder,
    issued::{self, IssuedTicket},
    reload::{self, Reading},
    seconds_now,
    texts::{self, FILES, KeyLine, Texts},
};
use std::{collections::HashMap, fmt::Write as _, path::Path, sync::Arc, time::Duration};
use tensor_relay_protocol::{Claims, Grant, Secret, SecretId, TicketId, Token, Verb};
use tensor_relay_transport::Fingerprint;
use tokio::sync::watch;

/// How many secrets may be valid at a time: the new one, and the one before it.
const SECRETS_MAX: usize = 2;

/// How many tickets may be listed as made by hand; a line has a few hundred bytes.
const ISSUED_MAX: usize = 20_000;

/// How many tickets' last uses are kept; of more, those that were used longest ago are forgotten.
pub(super) const USES_MAX: usize = 10_000;

/// The folder `access` of a state directory.
#[derive(Debug, Clone)]
pub struct AccessStore {
    folder: Folder,
}

impl AccessStore {
    /// The files below `state_dir`. Makes the first secret where there is none. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they cannot be written or read.
    pub fn open(state_dir: &Path) -> Result<Self, AccessStoreError> {
        let store = Self { folder: Folder::new(state_dir.join("access")) };
        if !store.folder.has("secrets")? {
            store.folder.make()?;
            let secret = lines([new_secret(None)].iter().map(Secret::to_line));
            store.folder.write_new("secrets", &secret)?; // Of two servers that start at once, both use the first one's.
        }
        store.folder.warn_if_exposed(&[&FILES[..], &["issued", "used"]].concat());
        store.secrets().map(|_| store)
    }

    /// The rules that the files hold now. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when a file cannot be read or holds something else.
    pub fn rules(&self) -> Result<Rules, AccessStoreError> {
        Texts::read(&self.folder)?.rules(&self.folder)
    }

    /// What a server follows that these files rule: a task of the current runtime looks at them until the last clone is
    /// dropped. Where they become unusable, the rules of before stay, and the log and [`Access::problem`] say why.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they are unusable now.
    pub fn follow(&self) -> Result<Access, AccessStoreError> {
        let texts = Texts::read(&self.folder)?;
        let sender = watch::Sender::new(Arc::new(texts.rules(&self.folder)?));
        let access = Access::following(sender.subscribe());
        let (uses, problem) = (Arc::downgrade(&access.uses), Arc::clone(&access.problem));
        let store = self.clone();
        let look = move |before: &Texts, used: Option<&HashMap<TicketId, u64>>| store.look(before, used);
        tokio::spawn(reload::follow_files(look, texts, sender, uses, problem));
        Ok(access)
    }

    /// One look of a running server, which took the files as in `before` last. Notes which tickets were `used`.
    fn look(&self, before: &Texts, used: Option<&HashMap<TicketId, u64>>) -> Reading {
        let look = || {
            let texts = Texts::read(&self.folder)?;
            texts.check_after(before, &self.folder)?;
            Ok((texts.rules(&self.folder)?, texts))
        };
        let noted = used.map_or(Ok(()), |used| self.note_uses(used));
        Reading { rules: look(), revoked: self.revoked().unwrap_or_default(), noted }
    }

    /// Seals `claims`, and does not list them: for tickets that are made anew at each start.
    ///
    /// # Errors
    /// [`AccessStoreError`] when there is no secret.
    pub fn seal(&self, claims: &Claims) -> Result<Token, AccessStoreError> {
        let secrets = self.secrets()?;
        let secret = secrets
            .first()
            .ok_or_else(|| self.folder.wrong("secrets", &"it holds no secret"))?;
        Ok(secret.seal(claims))
    }

    /// Makes a ticket by hand, and lists it: a new token for `holder`, with what it claims.
    ///
    /// # Errors
    /// [`AccessStoreError::Unfit`] for what no token holds, and others when it cannot be listed.
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
                "nobody publishes with a ticket: who may publish through the socket, lines `uid:NUMBER publish TOPICS` of the \
                 access control list say",
            ));
        }
        if self.issued()?.len() >= ISSUED_MAX {
            return Err(AccessStoreError::Unfit(
                "as many are listed as can be: remove the lines of those that are over from access/issued",
            ));
        }
        let issued_s = seconds_now();
        let expires_s = valid_for.map(|valid| issued_s.saturating_add(valid.as_secs().max(1)));
        let claims = Claims { id: TicketId(rand::random()), holder: holder.to_owned(), expires_s, grants };
        let secret = self.secrets()?.swap_remove(0);
        let token = secret.seal(&claims);
        if Token::new(token.as_str()).is_err() || token.read_unproven().is_err() {
            return Err(AccessStoreError::Unfit(
                "it is for more topics, or a longer name, than a ticket holds: write fewer globs that match more",
            ));
        }
        let issued = IssuedTicket { claims: claims.clone(), issued_s, secret: Some(secret.id()) };
        self.folder.append("issued", &issued::to_line(&issued))?;
        Ok((claims, token))
    }

    /// The tickets that were made by hand, oldest first.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they cannot be read.
    pub fn issued(&self) -> Result<Vec<IssuedTicket>, AccessStoreError> {
        self.read_lines("issued", issued::from_line)
    }

    /// When each ticket was used last, in seconds since 1970, up to a minute ago.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be read.
    pub fn used(&self) -> Result<HashMap<TicketId, u64>, AccessStoreError> {
        let uses = self.read_lines("used", |line| {
            let (id, used_s) = line.split_once(' ')?;
            Some((id.parse().ok()?, used_s.parse().ok()?))
        })?;
        Ok(uses.into_iter().collect())
    }

    /// Makes a ticket invalid; servers notice within two seconds and cut its sessions. Returns whether it was valid.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn revoke(&self, id: TicketId) -> Result<bool, AccessStoreError> {
        if self.revoked()?.contains(&id) {
            return Ok(false);
        }
        self.folder.append("revoked", &id.to_string())?;
        Ok(true)
    }

    /// Lets clients in that hold `key`, under `name` in the access control list. A key that was known gets the new name.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn trust(&self, key: Fingerprint, name: &str) -> Result<(), AccessStoreError> {
        self.change_key(key, format!("{key} {name}"))
    }

    /// Lets nobody in any more with the key that is called `name`, or has that fingerprint, whatever token is beside it.
    /// Returns whether there was one.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn distrust(&self, name: &str) -> Result<bool, AccessStoreError> {
        let keys = self.rules()?.keys.into_iter();
        let mut meant = keys.filter(|(key, known)| key.to_string() == name || known == name);
        let Some((key, _)) = meant.next() else { return Ok(false) };
        self.change_key(key, format!("revoked {key}"))?;
        meant.try_for_each(|(key, _)| self.change_key(key, format!("revoked {key}")))?;
        Ok(true)
    }

    /// Replaces what `keys` says of a key by `line`.
    fn change_key(&self, key: Fingerprint, line: String) -> Result<(), AccessStoreError> {
        self.rules()?; // What is not understood is not rewritten.
        let text = self.folder.read("keys")?.unwrap_or_default();
        let others = text
            .lines()
            .filter(|line| KeyLine::parse(line).is_none_or(|line| line.key() != key));
        self.folder.write("keys", &lines(others.map(str::to_owned).chain([line])))
    }

    /// Begins to seal with a new secret. Tickets of the one before stay valid until the next time, older ones end now.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn rotate(&self) -> Result<(), AccessStoreError> {
        let mut secrets = self.secrets()?;
        secrets.insert(0, new_secret(secrets.first()));
        secrets.truncate(SECRETS_MAX);
        self.folder.write("secrets", &lines(secrets.iter().map(Secret::to_line)))
    }

    /// Writes down when tickets were used, beside what other servers of this folder wrote.
    fn note_uses(&self, uses: &HashMap<TicketId, u64>) -> Result<(), AccessStoreError> {
        let mut known = self.used().unwrap_or_default(); // What is broken is replaced: it is news alone.
        for (id, used_s) in uses {
            let known = known.entry(*id).or_default();
            *known = (*known).max(*used_s);
        }
        if known.len() > USES_MAX {
            let mut times: Vec<u64> = known.values().copied().collect();
            let (_, oldest, _) = times.select_nth_unstable(known.len() - USES_MAX);
            let oldest = *oldest;
            known.retain(|_, used_s| *used_s >= oldest);
        }
        self.folder
            .write("used", &lines(known.iter().map(|(id, used_s)| format!("{id} {used_s}"))))
    }

    fn revoked(&self) -> Result<Vec<TicketId>, AccessStoreError> {
        texts::revoked(&self.folder, &self.folder.read("revoked")?.unwrap_or_default())
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

fn lines(lines: impl Iterator<Item = String>) -> String {
    lines.fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "{line}"); // To a string.
        text
    })
}

/// A new secret, whose number is not that of `before`.
fn new_secret(before: Option<&Secret>) -> Secret {
    let number = before.map_or(1, |secret| secret.id().0.wrapping_add(1));
    Secret::new(SecretId(number), rand::random())
}

#[cfg(test)]
mod tests;
