//! The files that say who may come in, in the folder `access` of a server's state directory.
//!
//! | file | what it holds |
//! |---|---|
//! | `secrets` | the secrets that seal tickets, one a line; the first seals new ones. Whoever reads it can make tickets |
//! | `issued` | the tickets that were made by hand, one a line |
//! | `revoked` | the tickets that are not valid any more, one a line |
//! | `used` | when each ticket was used last |
//! | `keys` | the keys of clients, `sha256:… NAME` a line |
//! | `ca.pem` | the authorities whose clients are known by the names in their certificates |
//! | `acl` | what they may do, as [`Acl`](super::Acl) has it |
//!
//! All but `secrets` may be missing. A running server looks at them every two seconds, by name, so that a file may be
//! replaced however one likes, Kubernetes' exchange of a link included.

use super::{
    Access, Rules,
    issued::{self, IssuedTicket},
    reload, seconds_now,
};
use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tensor_relay_protocol::{Claims, Grant, Secret, SecretId, TicketId, Token};
use tensor_relay_transport::{ClientAuthorities, Fingerprint};
use tokio::sync::watch;

/// The most bytes of a file that are read: a revoked ticket takes 17, a key 80.
const FILE_MAX_BYTES: u64 = 16 << 20;

/// How many secrets may be valid at a time: the new one, and the one before it.
const SECRETS_MAX: usize = 2;

/// The folder `access` of a state directory.
#[derive(Debug, Clone)]
pub struct AccessStore {
    folder: PathBuf,
}

/// Why the files cannot be used. Whoever looks after the state directory is to blame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessStoreError {
    /// The system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No ticket can be as it was asked for.
    #[error("cannot make the ticket: {0}")]
    Unfit(&'static str),
    /// A file does not hold what it should.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl AccessStore {
    /// The files below `state_dir`. Makes the first secret where there is none. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they cannot be written or read.
    pub fn open(state_dir: &Path) -> Result<Self, AccessStoreError> {
        let store = Self { folder: state_dir.join("access") };
        let path = store.path("secrets");
        let failed = |action, source| AccessStoreError::File { action, path: path.clone(), source };
        match fs::metadata(&path) {
            Ok(found) if found.mode() & 0o077 != 0 => tracing::warn!(
                "The secrets in {0} can be read by others, who can make tickets with them: run `chmod 600 {0}`.",
                path.display()
            ),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let made = DirBuilder::new().recursive(true).mode(0o700).create(&store.folder);
                made.map_err(|error| failed("make the folder of", error))?;
                store.write("secrets", &lines([new_secret(None)].iter().map(Secret::to_line)))?;
            }
            Err(error) => return Err(failed("look at", error)),
        }
        store.secrets().map(|_| store)
    }

    /// The rules that the files hold now. Blocks.
    ///
    /// # Errors
    /// [`AccessStoreError`] when a file cannot be read or holds something else.
    pub fn rules(&self) -> Result<Rules, AccessStoreError> {
        let secrets = self.secrets()?;
        let revoked = self.revoked()?;
        let keys = self.read_lines("keys", |line| {
            let (key, name) = line.split_once(' ')?;
            Some((key.parse::<Fingerprint>().ok()?, name.trim().to_owned()))
        })?;
        let authorities = match self.read("ca.pem")? {
            Some(pem) => ClientAuthorities::from_pem(&pem).map_err(|why| self.wrong("ca.pem", &why))?,
            None => ClientAuthorities::default(),
        };
        let acl = self.read("acl")?.unwrap_or_default().parse();
        Ok(Rules {
            open: false,
            secrets,
            revoked: revoked.into_iter().collect(),
            keys: keys.into_iter().collect(),
            authorities,
            acl: acl.map_err(|why| self.wrong("acl", &why))?,
        })
    }

    /// What a server follows that these files rule: a task of the current runtime looks at them until the last clone is
    /// dropped. Where they become unusable, the rules of before stay, and the log says why.
    ///
    /// # Errors
    /// [`AccessStoreError`] when they are unusable now.
    pub fn follow(&self) -> Result<Access, AccessStoreError> {
        let sender = watch::Sender::new(Arc::new(self.rules()?));
        let access = Access::following(sender.subscribe());
        tokio::spawn(reload::keep_up(self.clone(), sender, Arc::downgrade(&access.uses)));
        Ok(access)
    }

    /// Seals `claims`, and does not list them: for tickets that are made anew at each start.
    ///
    /// # Errors
    /// [`AccessStoreError`] when there is no secret.
    pub fn seal(&self, claims: &Claims) -> Result<Token, AccessStoreError> {
        let secrets = self.secrets()?;
        let secret = secrets.first().ok_or_else(|| self.wrong("secrets", &"it holds no secret"))?;
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
        let issued_s = seconds_now();
        let expires_s = valid_for.map(|valid| issued_s.saturating_add(valid.as_secs().max(1)));
        let claims = Claims { id: TicketId(rand::random()), holder: holder.to_owned(), expires_s, grants };
        let token = self.seal(&claims)?;
        if Token::new(token.as_str()).is_err() || token.read_unproven().is_err() {
            return Err(AccessStoreError::Unfit(
                "it is for more topics, or a longer name, than a ticket holds: write fewer globs that match more",
            ));
        }
        self.append("issued", &issued::to_line(&IssuedTicket { claims: claims.clone(), issued_s }))?;
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
        self.append("revoked", &id.to_string())?;
        Ok(true)
    }

    /// Lets clients in that hold `key`, under `name` in the access control list. A key that was known gets the new name.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn trust(&self, key: Fingerprint, name: &str) -> Result<(), AccessStoreError> {
        self.change_keys(|known| known != key, Some(format!("{key} {name}"))).map(drop)
    }

    /// Lets nobody in any more with the key that is called `name`, or has that fingerprint. Returns whether there was one.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn distrust(&self, name: &str) -> Result<bool, AccessStoreError> {
        let keys = self.rules()?.keys;
        let is_meant =
            |key: &Fingerprint| key.to_string() == name || keys.get(key).is_some_and(|known| known == name);
        self.change_keys(|known| !is_meant(&known), None)
    }

    /// Keeps the lines of `keys` that `keeps` says, and adds one. Returns whether any went.
    fn change_keys(
        &self,
        keeps: impl Fn(Fingerprint) -> bool,
        added: Option<String>,
    ) -> Result<bool, AccessStoreError> {
        self.rules()?; // What is not understood is not rewritten.
        let text = self.read("keys")?.unwrap_or_default();
        let key_of = |line: &str| line.trim().split_once(' ').and_then(|(key, _)| key.parse().ok());
        let (kept, gone): (Vec<_>, Vec<_>) = text.lines().partition(|line| key_of(line).is_none_or(&keeps));
        self.write("keys", &lines(kept.into_iter().map(str::to_owned).chain(added)))?;
        Ok(!gone.is_empty())
    }

    /// Begins to seal with a new secret. Tickets of the one before stay valid until the next time, older ones end now.
    ///
    /// # Errors
    /// [`AccessStoreError`] when that cannot be written.
    pub fn rotate(&self) -> Result<(), AccessStoreError> {
        let mut secrets = self.secrets()?;
        secrets.insert(0, new_secret(secrets.first()));
        secrets.truncate(SECRETS_MAX);
        self.write("secrets", &lines(secrets.iter().map(Secret::to_line)))
    }

    /// Writes down when tickets were used, beside what other servers of this folder wrote.
    pub(super) fn note_uses(&self, uses: &HashMap<TicketId, u64>) -> Result<(), AccessStoreError> {
        let mut known = self.used().unwrap_or_default(); // What is broken is replaced: it is news alone.
        for (id, used_s) in uses {
            let known = known.entry(*id).or_default();
            *known = (*known).max(*used_s);
        }
        self.write("used", &lines(known.iter().map(|(id, used_s)| format!("{id} {used_s}"))))
    }

    pub(super) fn revoked(&self) -> Result<Vec<TicketId>, AccessStoreError> {
        self.read_lines("revoked", |line| line.parse().ok())
    }

    fn secrets(&self) -> Result<Vec<Secret>, AccessStoreError> {
        let secrets = self.read_lines("secrets", |line| Secret::from_line(line).ok())?;
        match secrets.is_empty() {
            true => Err(self.wrong(
                "secrets",
                &"it is missing or holds no secret; a server makes one at its first start",
            )),
            false => Ok(secrets),
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    fn wrong(&self, file: &str, why: &dyn std::fmt::Display) -> AccessStoreError {
        AccessStoreError::Content { path: self.path(file), why: why.to_string() }
    }

    fn failed(&self, action: &'static str, file: &str) -> impl Fn(io::Error) -> AccessStoreError {
        let path = self.path(file);
        move |source| AccessStoreError::File { action, path: path.clone(), source }
    }

    /// The text of `file`; `None` where there is none.
    fn read(&self, file: &str) -> Result<Option<String>, AccessStoreError> {
        let opened = match fs::File::open(self.path(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(self.failed("read", file))?,
        };
        let mut text = String::new();
        let read = opened.take(FILE_MAX_BYTES + 1).read_to_string(&mut text);
        match read.map_err(self.failed("read", file))? as u64 {
            0..=FILE_MAX_BYTES => Ok(Some(text)),
            _ => Err(self.wrong(file, &format!("it has more than {FILE_MAX_BYTES} bytes"))),
        }
    }

    fn read_lines<T>(
        &self,
        file: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, AccessStoreError> {
        let text = self.read(file)?.unwrap_or_default();
        let lines = text.lines().enumerate().map(|(index, line)| (index, line.trim_matches(' ')));
        let said = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        // The line itself may be a secret.
        let parsed = said.map(|(index, line)| {
            parse(line).ok_or_else(|| self.wrong(file, &format!("line {} is not understood", index + 1)))
        });
        parsed.collect()
    }

    /// Replaces `file` in one step, by one that its owner alone can read.
    fn write(&self, file: &str, text: &str) -> Result<(), AccessStoreError> {
        let write = || {
            let mut temporary = tempfile::NamedTempFile::new_in(&self.folder)?; // Private from the start.
            temporary.write_all(text.as_bytes())?;
            temporary.as_file().sync_all()?;
            temporary.persist(self.path(file)).map(drop).map_err(|failed| failed.error)
        };
        write().map_err(self.failed("write", file))
    }

    /// Adds a line with a single write, so that two who do so at once leave two lines.
    fn append(&self, file: &str, line: &str) -> Result<(), AccessStoreError> {
        let write = || {
            let mut opened =
                OpenOptions::new().append(true).create(true).mode(0o600).open(self.path(file))?;
            opened.write_all(format!("{line}\n").as_bytes())?;
            opened.sync_all()
        };
        write().map_err(self.failed("write", file))
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
