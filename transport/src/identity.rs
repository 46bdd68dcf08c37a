//! [`Identity`]: the key pair of a server or a client, identified by its [`Fingerprint`].

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustix::{fs::OFlags, process::geteuid};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer,
    pem::{self, PemObject},
};
use std::{
    fmt,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    str::FromStr,
};

/// The maximum number of bytes read from a key file; a key has a few hundred.
const KEY_MAX_BYTES: u64 = 64 << 10;

/// The name of the file in the state directory that contains the private key, in PEM.
const KEY_FILE: &str = "identity.key";

/// The name in the self-signed certificate. Clients identify servers by key, so any valid name works.
pub(crate) const SERVER_NAME: &str = "tensor-relay";

/// The SHA-256 digest of a public key (of its SubjectPublicKeyInfo in DER), by which tickets pin the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    pub(crate) fn of(subject_public_key_info: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, subject_public_key_info);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// The text is not a fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not `sha256:` and 64 hexadecimal digits")]
pub struct FingerprintError;

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let digits = text.strip_prefix("sha256:").ok_or(FingerprintError)?.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(FingerprintError);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = str::from_utf8(pair).map_err(|_| FingerprintError)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| FingerprintError)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The private key of a server or a client, and its certificate.
///
/// Unless a certificate is [given](Self::from_files), a self-signed one that never expires is generated at each start.
/// A generated key is ECDSA P-256, which every TLS library supports.
pub struct Identity {
    /// The certificate chain, the identity's own certificate first.
    certificates: Vec<CertificateDer<'static>>,
    key: PrivatePkcs8KeyDer<'static>,
    fingerprint: Fingerprint,
}

/// Why an identity could not be loaded or created. The cause is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The state directory or the key file cannot be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The attempted action.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The key file contains no valid key.
    #[error("{} is not a private key in PEM: {source}; a server creates a new one if you remove it (then tickets change)", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: rcgen::Error,
    },
    /// The certificate file cannot be read, or contains no valid certificate.
    #[error("{} holds no certificate in PEM: {source}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: pem::Error,
    },
    /// Other users can replace the key.
    #[error("the key {} {why}: others may replace it; {fix}, or use another path", path.display())]
    Unsafe {
        /// The file.
        path: PathBuf,
        /// The owner or mode that allows this.
        why: String,
        /// The command that prevents it.
        fix: String,
    },
    /// No key could be generated.
    #[error("cannot generate a key: {0}")]
    Generate(#[from] rcgen::Error),
}

impl Identity {
    /// A new identity that is not stored.
    ///
    /// # Errors
    /// [`IdentityError::Generate`] when the system provides no randomness.
    pub fn ephemeral() -> Result<Self, IdentityError> {
        Ok(Self::from_key(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)?)
    }

    /// The identity stored in `state_dir`, created at the first call: the key, and so tickets, survive restarts.
    ///
    /// Created files are private for any umask. A key that its group or others can read, or its group can write (as in
    /// volumes and secrets of Kubernetes), is used with a warning, and so is a directory that its group or others can
    /// write. A key that everybody can write, or that belongs to a user other than root and this process's, is refused.
    ///
    /// # Errors
    /// [`IdentityError`] when the directory cannot be written at first start, or when the key cannot be read or is
    /// refused.
    pub fn load_or_create(state_dir: &Path) -> Result<Self, IdentityError> {
        let path = state_dir.join(KEY_FILE);
        let identity = match Self::load(&path) {
            Err(IdentityError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::create(state_dir, &path)?
            }
            loaded => loaded?,
        };
        warn_of_shared_directory(state_dir);
        Ok(identity)
    }

    /// The identity of a client, from the private key in the PEM file `key`, for servers that identify clients by their
    /// keys. The PEM file `certificate`, if any, contains the certificate of that key and then intermediate ones, for
    /// servers that identify clients by the names in their certificates.
    ///
    /// # Errors
    /// [`IdentityError`] when one of the files cannot be read, or the key is refused as by
    /// [`load_or_create`](Self::load_or_create).
    pub fn from_files(key: &Path, certificate: Option<&Path>) -> Result<Self, IdentityError> {
        let identity = Self::load(key)?;
        let Some(path) = certificate else { return Ok(identity) };
        let failed = |source| IdentityError::Certificate { path: path.into(), source };
        let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
        let certificates: Vec<_> = certificates.map_err(failed)?;
        match certificates.is_empty() {
            true => Err(failed(pem::Error::NoItemsFound)),
            false => Ok(Self { certificates, ..identity }),
        }
    }

    /// The default directory for identities, by the XDG specification. `None` without a home directory, as in some
    /// containers.
    pub fn default_dir() -> Option<PathBuf> {
        let from_env = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        from_env("XDG_STATE_HOME")
            .map(|dir| dir.join("tensor-relay"))
            .or_else(|| from_env("HOME").map(|home| home.join(".local/state/tensor-relay")))
    }

    /// The fingerprint of the identity's key, by which peers identify it.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub(crate) fn certificates(&self) -> Vec<CertificateDer<'static>> {
        self.certificates.clone()
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }

    /// Derives a key for a purpose other than TLS. The derived key is the same after a restart.
    pub(crate) fn derived_key(&self, purpose: &str) -> aws_lc_rs::hmac::Key {
        use aws_lc_rs::hmac;
        let root = hmac::Key::new(hmac::HMAC_SHA256, self.key.secret_pkcs8_der());
        hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&root, purpose.as_bytes()).as_ref())
    }

    fn load(path: &Path) -> Result<Self, IdentityError> {
        let pem = read_key(path)?;
        let key = KeyPair::from_pem(&pem);
        let key = key.map_err(|source| IdentityError::Key { path: path.into(), source })?;
        Ok(Self::from_key(&key)?)
    }

    fn create(state_dir: &Path, path: &Path) -> Result<Self, IdentityError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(state_dir);
        made.map_err(|source| IdentityError::File {
            action: "create the state directory",
            path: state_dir.into(),
            source,
        })?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        match write_new_private(path, key.serialize_pem().as_bytes()) {
            Ok(()) => Ok(Self::from_key(&key)?),
            // Another process created a key in the meantime: use that one.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::load(path),
            Err(source) => Err(IdentityError::File { action: "write", path: path.into(), source }),
        }
    }

    fn from_key(key: &KeyPair) -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.into()])?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, SERVER_NAME);
        let certificate = params.self_signed(key)?.der().clone();
        let fingerprint = Fingerprint::of(&key.subject_public_key_info());
        Ok(Self {
            certificates: vec![certificate],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()),
            fingerprint,
        })
    }
}

impl fmt::Debug for Identity {
    /// Shows the fingerprint and never the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

/// Reads a key file, after checking its permissions.
fn read_key(path: &Path) -> Result<String, IdentityError> {
    let failed = |source| IdentityError::File { action: "read", path: path.into(), source };
    // Opening a FIFO must not block.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let (mode, user) = (metadata.mode() & 0o777, geteuid().as_raw());
    match Exposure::of(&metadata) {
        Exposure::None => {}
        exposure @ (Exposure::Readable | Exposure::GroupWritable) => tracing::warn!(
            "The key {0} has mode {mode:04o} and {exposure}: they can impersonate its owner. Make it private with \
             `chmod 600 {0}` or, if it is a mounted secret, by the mode of the mount (0400).",
            path.display()
        ),
        Exposure::Writable => {
            let (why, fix) = (format!("has mode {mode:04o}"), format!("run `chmod 600 {}`", path.display()));
            return Err(IdentityError::Unsafe { path: path.into(), why, fix });
        }
        Exposure::Foreign => {
            let why = format!("belongs to user {}, and this process runs as user {user}", metadata.uid());
            let fix = format!("run `chown {user} {}` as root", path.display());
            return Err(IdentityError::Unsafe { path: path.into(), why, fix });
        }
    }
    let mut pem = String::new();
    file.take(KEY_MAX_BYTES).read_to_string(&mut pem).map_err(failed)?;
    Ok(pem)
}

/// Access to a file by users other than root and this process's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// Nobody else can read or write it.
    None,
    /// Its group or others can read it.
    Readable,
    /// Its group can write it. Kubernetes sets such a mode at each mount of a volume with `fsGroup`.
    GroupWritable,
    /// Everybody can write it, whoever owns it.
    Writable,
    /// It belongs to another user, who can write it.
    Foreign,
}

impl Exposure {
    /// The exposure of the file with the given `metadata`.
    pub fn of(metadata: &fs::Metadata) -> Self {
        exposure(metadata.mode() & 0o777, metadata.uid(), geteuid().as_raw())
    }
}

/// The exposure as a clause about the file.
impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "is private",
            Self::Readable => "can be read by others",
            Self::GroupWritable => "can be changed by its group",
            Self::Writable => "can be changed by everybody",
            Self::Foreign => "belongs to another user",
        })
    }
}

fn exposure(mode: u32, owner: u32, user: u32) -> Exposure {
    match () {
        () if mode & 0o002 != 0 => Exposure::Writable,
        () if owner != user && owner != 0 => Exposure::Foreign,
        () if mode & 0o020 != 0 => Exposure::GroupWritable,
        () if mode & 0o044 != 0 => Exposure::Readable,
        () => Exposure::None,
    }
}

/// Warns when the group of the directory or others can create or replace files in it.
fn warn_of_shared_directory(state_dir: &Path) {
    let Ok(metadata) = fs::metadata(state_dir) else { return };
    let mode = metadata.mode() & 0o777;
    if mode & 0o022 != 0 {
        tracing::warn!(
            "The state directory {0} has mode {mode:04o}: others can replace the server's key in it. Prevent that with \
             `chmod go-w {0}`.",
            state_dir.display()
        );
    }
}

/// Writes a new file that only its owner can read. Renames a temporary file, so that no process reads a partial key.
fn write_new_private(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?; // Private from the start.
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist_noclobber(path).map(|_| ()).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_stored_identity_is_the_same_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let first = Identity::load_or_create(&state).unwrap();
        let second = Identity::load_or_create(&state).unwrap();
        assert_eq!(first.fingerprint(), second.fingerprint());
        assert_ne!(first.fingerprint(), Identity::ephemeral().unwrap().fingerprint());
        let mode = fs::metadata(state.join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn exposure_follows_owner_and_mode() {
        for (mode, owner, user, expected) in [
            (0o600, 7, 7, Exposure::None),
            (0o400, 0, 7, Exposure::None),
            (0o440, 0, 7, Exposure::Readable),      // A secret with fsGroup.
            (0o644, 0, 7, Exposure::Readable),      // A secret with the default mode.
            (0o660, 7, 7, Exposure::GroupWritable), // A volume with fsGroup.
            (0o602, 7, 7, Exposure::Writable),
            (0o666, 0, 7, Exposure::Writable),
            (0o666, 8, 7, Exposure::Writable),
            (0o664, 8, 7, Exposure::Foreign),
            (0o600, 8, 7, Exposure::Foreign),
            (0o600, 8, 0, Exposure::Foreign),
        ] {
            assert_eq!(exposure(mode, owner, user), expected, "{mode:o} of {owner} for {user}");
        }
    }

    #[test]
    fn an_invalid_key_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(KEY_FILE), "nonsense").unwrap();
        let error = Identity::load_or_create(dir.path()).unwrap_err();
        assert!(matches!(error, IdentityError::Key { .. }), "{error}");
    }

    #[test]
    fn debug_output_omits_the_key() {
        let shown = format!("{:?}", Identity::ephemeral().unwrap());
        assert!(shown.starts_with("Identity { fingerprint: sha256:") && shown.len() < 120, "{shown}");
    }
}
