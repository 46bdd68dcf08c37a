//! The server's key: made at first start, kept, and known to clients by its fingerprint.

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::{
    fmt, fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The file in the state directory that holds the private key, PEM, readable by its owner alone.
const KEY_FILE: &str = "identity.key";

/// The name in the self-made certificate. Clients know servers by key, so the name only has to be a valid one.
pub(crate) const SERVER_NAME: &str = "tensor-relay";

/// The SHA-256 of a public key (its DER SubjectPublicKeyInfo): what a ticket pins.
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

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A server's private key and a certificate made from it.
///
/// Only the key is kept: the certificate says nothing but the key's name and is made anew at each start, so nothing
/// expires. The key is ECDSA P-256, which every TLS library verifies.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
    fingerprint: Fingerprint,
}

/// Why there is no identity. This machine is to blame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The state directory or the key file cannot be used.
    #[error("cannot {action} {}: {source}; give another place with --state-dir", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The key file is not a key.
    #[error("{} is not a private key in PEM: {source}; remove it to have a new one made (tickets change then)", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: rcgen::Error,
    },
    /// No key could be made.
    #[error("cannot make a key: {0}")]
    Generate(#[from] rcgen::Error),
}

impl Identity {
    /// A new identity that lives as long as the process.
    ///
    /// # Errors
    /// [`IdentityError::Generate`] when the system gives no randomness.
    pub fn ephemeral() -> Result<Self, IdentityError> {
        Ok(Self::from_key(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)?)
    }

    /// The identity kept in `state_dir`, made at the first call: the same key, so the same tickets, after a restart.
    ///
    /// # Errors
    /// [`IdentityError`] when the directory cannot be written at first start, or the key in it cannot be read.
    pub fn load_or_create(state_dir: &Path) -> Result<Self, IdentityError> {
        let path = state_dir.join(KEY_FILE);
        match Self::load(&path) {
            Err(IdentityError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::create(state_dir, &path)
            }
            loaded => loaded,
        }
    }

    /// Where an identity is kept when nobody says where: where the XDG specification puts state. `None` where there is no
    /// home directory, as in some containers.
    pub fn default_dir() -> Option<PathBuf> {
        let from_env = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        from_env("XDG_STATE_HOME")
            .map(|dir| dir.join("tensor-relay"))
            .or_else(|| from_env("HOME").map(|home| home.join(".local/state/tensor-relay")))
    }

    /// What clients know this identity by.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }

    /// A key for other purposes than TLS, the same after a restart; `purpose` tells them apart.
    pub(crate) fn derived_key(&self, purpose: &str) -> aws_lc_rs::hmac::Key {
        use aws_lc_rs::hmac;
        let root = hmac::Key::new(hmac::HMAC_SHA256, self.key.secret_pkcs8_der());
        hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&root, purpose.as_bytes()).as_ref())
    }

    fn load(path: &Path) -> Result<Self, IdentityError> {
        let pem = fs::read_to_string(path);
        let pem = pem.map_err(|source| IdentityError::File { action: "read", path: path.into(), source })?;
        let key = KeyPair::from_pem(&pem);
        let key = key.map_err(|source| IdentityError::Key { path: path.into(), source })?;
        Ok(Self::from_key(&key)?)
    }

    fn create(state_dir: &Path, path: &Path) -> Result<Self, IdentityError> {
        fs::create_dir_all(state_dir).map_err(|source| IdentityError::File {
            action: "create the state directory",
            path: state_dir.into(),
            source,
        })?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        match write_new_private(path, key.serialize_pem().as_bytes()) {
            Ok(()) => Ok(Self::from_key(&key)?),
            // Another server with this state directory was faster: both have its key.
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
        Ok(Self { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()), fingerprint })
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

/// Writes a file that only its owner can read and that did not exist: whole under a temporary name first, then put into
/// place, so that nobody ever reads half a key.
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
    fn a_kept_identity_is_the_same_and_private() {
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
    fn a_broken_key_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(KEY_FILE), "nonsense").unwrap();
        let error = Identity::load_or_create(dir.path()).unwrap_err();
        assert!(matches!(error, IdentityError::Key { .. }), "{error}");
    }

    #[test]
    fn debug_output_holds_no_key() {
        let shown = format!("{:?}", Identity::ephemeral().unwrap());
        assert!(shown.starts_with("Identity { fingerprint: sha256:") && shown.len() < 120, "{shown}");
    }
}
