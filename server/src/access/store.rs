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

use super::{Access, Rules, seconds_now};
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

/// How often a running server looks at the files.
const LOOK: Duration = Duration::from_secs(2);

/// The most bytes of a file that are read: a revoked ticket takes 17, a key 80.
const FILE_MAX_BYTES: u64 = 16 << 20;

/// How many secrets may be valid at a time: the new one, and the one before it.
const SECRETS_MAX: usize = 2;

/// The folder `access` of a state directory.
#[derive(Debug, Clone)]
pub struct AccessStore {
    folder: PathBuf,
}

/// A ticket that was made by hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedTicket {
    /// What it says.
    pub claims: Claims,
    /// When it was made, in seconds since 1970.
    pub issued_s: u64,
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
        tokio::spawn(keep_up(self.clone(), sender, Arc::downgrade(&access.uses)));
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

    fn revoked(&self) -> Result<Vec<TicketId>, AccessStoreError> {
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

/// Looks at the files until nobody follows the rules any more, and writes down which tickets were used.
async fn keep_up(
    store: AccessStore,
    sender: watch::Sender<Arc<Rules>>,
    uses: std::sync::Weak<std::sync::Mutex<HashMap<TicketId, u64>>>,
) {
    let (mut unread, mut unwritten, mut written) = (Told::default(), Told::default(), HashMap::new());
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let used = uses
            .upgrade()
            .map(|uses| uses.lock().map(|uses| uses.clone()).unwrap_or_default());
        let used = used.filter(|used| *used != written);
        let (looking, noting) = (store.clone(), used.clone());
        let look = tokio::task::spawn_blocking(move || {
            (looking.rules(), looking.revoked(), noting.map(|used| looking.note_uses(&used)))
        });
        let Ok((rules, revoked, noted)) = look.await else { return }; // The runtime ends.
        match rules {
            Ok(rules) => {
                unread = Told::default();
                replace(&sender, rules);
            }
            Err(error) => {
                unread.tell(&error, "The rules of access cannot be read; those of before stay in force.");
                // What is wrong with another file does not keep a stolen ticket valid.
                let known = sender.borrow().as_ref().clone();
                replace(
                    &sender,
                    Rules { revoked: revoked.unwrap_or_default().into_iter().collect(), ..known },
                );
            }
        }
        match noted {
            Some(Err(error)) => unwritten.tell(&error, "When tickets are used cannot be written down."),
            _ => written = used.unwrap_or(written),
        }
    }
}

/// Puts `rules` in force. What was revoked stays so for as long as the server runs: a file that is cut short while it is
/// written lets nobody in again.
fn replace(sender: &watch::Sender<Arc<Rules>>, mut rules: Rules) {
    sender.send_if_modified(|known| {
        rules.revoked.extend(&known.revoked);
        let is_new = **known != rules;
        if is_new {
            tracing::info!("The rules of access were replaced.");
            *known = Arc::new(rules);
        }
        is_new
    });
}

/// The error that the log was told of last, so that it is told once for as long as it lasts.
#[derive(Debug, Default)]
struct Told(String);

impl Told {
    fn tell(&mut self, error: &AccessStoreError, what: &str) {
        let error = error.to_string();
        if error != self.0 {
            tracing::warn!(%error, "{what}");
            self.0 = error;
        }
    }
}

impl AccessStore {
    /// Writes down when tickets were used, beside what other servers of this folder wrote.
    fn note_uses(&self, uses: &HashMap<TicketId, u64>) -> Result<(), AccessStoreError> {
        let mut known = self.used().unwrap_or_default(); // What is broken is replaced: it is news alone.
        for (id, used_s) in uses {
            let known = known.entry(*id).or_default();
            *known = (*known).max(*used_s);
        }
        self.write("used", &lines(known.iter().map(|(id, used_s)| format!("{id} {used_s}"))))
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

/// The lines of `issued`: `ID ISSUED EXPIRES VERBS:TOPICS… HOLDER`, tabs between them, `-` for never.
mod issued {
    use super::IssuedTicket;
    use tensor_relay_protocol::{Claims, Glob, Grant};

    pub(super) fn to_line(ticket: &IssuedTicket) -> String {
        let Claims { id, holder, expires_s, grants } = &ticket.claims;
        let expires = expires_s.map_or_else(|| "-".into(), |s| s.to_string());
        let grants = grants.iter().map(|grant| format!("{grant}\t")).collect::<String>();
        format!("{id}\t{}\t{expires}\t{grants}{holder}", ticket.issued_s)
    }

    pub(super) fn from_line(line: &str) -> Option<IssuedTicket> {
        let words: Vec<_> = line.split('\t').collect();
        let [id, issued_s, expires, grants @ .., holder] = &words[..] else { return None };
        let grant = |text: &&str| {
            let (verbs, topics) = text.split_once(' ')?;
            Some(Grant { topics: Glob::new(topics).ok()?, verbs: verbs.parse().ok()? })
        };
        let expires_s = match *expires {
            "-" => None,
            expires_s => Some(expires_s.parse().ok()?),
        };
        let claims = Claims {
            id: id.parse().ok()?,
            holder: (*holder).to_owned(),
            expires_s,
            grants: grants.iter().map(grant).collect::<Option<_>>()?,
        };
        Some(IssuedTicket { claims, issued_s: issued_s.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Credentials, Decision, Denied};
    use std::os::unix::fs::PermissionsExt;
    use tensor_relay_protocol::{Glob, Topic, Verb, Verbs};

    fn claims(id: u8) -> Claims {
        let grant = |topics| Grant { topics: Glob::new(topics).unwrap(), verbs: Verbs::CONSUME };
        let grants = vec![grant("policy/**"), grant("a b")];
        Claims { id: TicketId([id; 8]), holder: "Paris, 2 GPUs".into(), expires_s: Some(u64::MAX), grants }
    }

    fn shown(token: Token) -> Credentials {
        Credentials { token: Some(token), certificate: None }
    }

    #[test]
    fn the_first_start_makes_a_secret_that_only_its_owner_reads() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let mode = fs::metadata(store.path("secrets")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = AccessStore::open(dir.path()).unwrap();
        assert_eq!(store.rules().unwrap(), again.rules().unwrap(), "it is made once");
    }

    #[test]
    fn tickets_are_issued_listed_and_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let (first, token) = store.issue("Paris, 2 GPUs", claims(1).grants, None).unwrap();
        let (second, _) = store.issue("", vec![], Some(Duration::from_secs(60))).unwrap();
        let issued = store.issued().unwrap();
        assert_eq!([&issued[0].claims, &issued[1].claims], [&first, &second]);
        assert_eq!((first.expires_s, second.expires_s), (None, Some(issued[1].issued_s + 60)));
        assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
        assert!(store.revoke(first.id).unwrap());
        assert!(!store.revoke(first.id).unwrap(), "once");
        assert_eq!(store.rules().unwrap().admit(&shown(token), 0), Err(Denied::Revoked(first.id)));
    }

    /// A ticket is revoked whatever else is broken, and stays so for a running server.
    #[tokio::test(start_paused = true)]
    async fn a_ticket_is_revoked_beside_a_broken_list() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let access = store.follow().unwrap();
        let (claims, _) = store.issue("", vec![], None).unwrap();
        fs::write(store.path("acl"), "nonsense").unwrap();
        assert!(AccessStore::open(dir.path()).unwrap().revoke(claims.id).unwrap());
        let look = || async {
            let mut rules = access.rules.clone();
            rules.mark_unchanged();
            let _ = tokio::time::timeout(2 * LOOK, rules.changed()).await;
            access.rules().revoked.contains(&claims.id)
        };
        assert!(look().await);
        fs::write(store.path("revoked"), "").unwrap();
        fs::remove_file(store.path("acl")).unwrap();
        assert!(look().await, "a file that was cut short lets nobody in again");
    }

    #[test]
    fn what_no_ticket_holds_is_refused_and_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let many = vec![Grant::everywhere(Verbs::CONSUME); 65];
        for (holder, grants) in [("a\tb", vec![]), ("a", many), (&*"a".repeat(256), vec![])] {
            let refused = store.issue(holder, grants, None);
            assert!(matches!(refused, Err(AccessStoreError::Unfit(_))), "{refused:?}");
        }
        assert_eq!(store.issued().unwrap(), []);
    }

    #[test]
    fn keys_are_trusted_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let (one, two) = (Fingerprint([1; 32]), Fingerprint([2; 32]));
        fs::write(store.path("keys"), "# mine\n").unwrap();
        store.trust(one, "a").unwrap();
        store.trust(two, "b").unwrap();
        store.trust(one, "c").unwrap();
        assert_eq!(store.rules().unwrap().keys, [(one, "c".to_owned()), (two, "b".to_owned())].into());
        assert!(!store.distrust("a").unwrap());
        assert!(store.distrust("b").unwrap() && store.distrust(&one.to_string()).unwrap());
        assert_eq!(fs::read_to_string(store.path("keys")).unwrap(), "# mine\n", "comments stay");
    }

    #[test]
    fn a_rotated_secret_is_valid_once_more() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let token = store.seal(&claims(1)).unwrap();
        store.rotate().unwrap();
        assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
        assert_ne!(store.seal(&claims(1)).unwrap(), token, "new tickets have the new one");
        store.rotate().unwrap();
        assert!(store.rules().unwrap().admit(&shown(token), 0).is_err());
    }

    #[test]
    fn broken_files_are_named_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let secrets = fs::read_to_string(store.path("secrets")).unwrap();
        for (file, text, told) in [
            ("secrets", secrets[1..].to_owned(), "line 1 is not understood"),
            ("secrets", String::new(), "holds no secret"),
            ("revoked", "\n# all\nnonsense".into(), "line 3 is not understood"),
            ("keys", "sha256:00 a".into(), "line 1 is not understood"),
            ("acl", "key:a read **".into(), "line 1: there is no verb"),
            ("ca.pem", "nonsense".into(), "no certificates of authorities"),
        ] {
            let before = fs::read(store.path(file)).ok();
            fs::write(store.path(file), &text).unwrap();
            let error = store.rules().unwrap_err().to_string();
            assert!(error.contains(told) && error.contains(file), "{error}");
            assert!(text.len() < 20 || !error.contains(&text[10..20]), "{error}");
            match before {
                Some(before) => fs::write(store.path(file), before).unwrap(),
                None => fs::remove_file(store.path(file)).unwrap(),
            }
        }
        assert!(store.rules().is_ok());
    }

    /// Rules that cannot be read change nothing; those that can do at the next look, also where a link was exchanged.
    #[tokio::test(start_paused = true)]
    async fn rules_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        let access = store.follow().unwrap();
        let key = Fingerprint([5; 32]);
        let topic = Topic::new("kv/a").unwrap();
        let looked = || async {
            let mut rules = access.rules.clone();
            rules.mark_unchanged();
            let _ = tokio::time::timeout(2 * LOOK, rules.changed()).await;
            let rules = access.rules();
            let name = rules.keys.get(&key).map(|name| format!("key:{name}"));
            name.is_some_and(|name| rules.acl.decide(&name, Verb::List, &topic) != Decision::Denied)
        };
        assert!(!looked().await);
        let elsewhere = dir.path().join("elsewhere");
        fs::write(&elsewhere, "key:gpu-* list kv/*").unwrap();
        std::os::unix::fs::symlink(&elsewhere, store.path("acl")).unwrap();
        fs::write(store.path("keys"), format!("{key} gpu-1\n")).unwrap();
        assert!(looked().await);
        fs::write(&elsewhere, "nonsense").unwrap();
        assert!(looked().await, "the rules of before stay");
        fs::write(&elsewhere, "").unwrap();
        assert!(!looked().await);
    }
}
