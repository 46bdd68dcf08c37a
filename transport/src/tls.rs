//! TLS 1.3 configuration. Clients authenticate servers by pinned keys.

use crate::{Fingerprint, Identity, identity};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{
        CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
    time_provider::TimeProvider,
};
use std::{
    sync::{Arc, OnceLock},
    time::SystemTime,
};
use tensor_relay_protocol::ALPN;

/// The server name (SNI) that clients send.
pub(crate) const SERVER_NAME: &str = identity::SERVER_NAME;

/// A server's configuration. Early data is disabled: a replayed request must not begin a transfer.
pub(crate) fn server_config(identity: &Identity) -> Result<rustls::ServerConfig, rustls::Error> {
    let mut config = rustls::ServerConfig::builder_with_details(crypto_provider(), Arc::new(AnyClock))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(AnyKey(crypto_provider().signature_verification_algorithms)))
        .with_single_cert(identity.certificates(), identity.key())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.max_early_data_size = 0;
    // Sessions are never resumed: every connection authenticates anew.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.ignore_client_order = true;
    Ok(config)
}

/// A client's configuration. `rejected_key` receives the key of a rejected server, for the error message. With an
/// `identity`, the client authenticates with the identity's key.
pub(crate) fn client_config(
    keys: &[Fingerprint],
    identity: Option<&Identity>,
    rejected_key: Arc<OnceLock<Fingerprint>>,
) -> Result<rustls::ClientConfig, rustls::Error> {
    let provider = crypto_provider();
    let verifier =
        PinnedKey { keys: keys.into(), rejected_key, algorithms: provider.signature_verification_algorithms };
    let config = rustls::ClientConfig::builder_with_details(provider, Arc::new(AnyClock))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        Some(identity) => config.with_client_auth_cert(identity.certificates(), identity.key())?,
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.enable_early_data = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// A server's configuration over a byte stream. Secrets are extracted for [our own records](crate::lane::byte_stream).
pub(crate) fn stream_server_config(identity: &Identity) -> Result<rustls::ServerConfig, rustls::Error> {
    let mut config = server_config(identity)?;
    config.enable_secret_extraction = true;
    Ok(config)
}

/// A client's configuration over a byte stream.
pub(crate) fn stream_client_config(
    keys: &[Fingerprint],
    identity: Option<&Identity>,
    rejected_key: Arc<OnceLock<Fingerprint>>,
) -> Result<rustls::ClientConfig, rustls::Error> {
    let mut config = client_config(keys, identity, rejected_key)?;
    config.enable_secret_extraction = true;
    Ok(config)
}

/// Whether ALPN selected this protocol. QUIC enforces ALPN; over a byte stream the handshake succeeds even if the peer
/// offers no protocol.
pub(crate) fn is_protocol_agreed(connection: &rustls::CommonState) -> bool {
    connection.alpn_protocol() == Some(ALPN)
}

/// The system's clock. One before 1970, as after a power loss, reads 1970: rustls' own provider panics. Times matter only
/// to certificates of an authority, which are then not valid yet.
#[derive(Debug)]
struct AnyClock;

impl TimeProvider for AnyClock {
    fn current_time(&self) -> Option<UnixTime> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Some(UnixTime::since_unix_epoch(since.unwrap_or_default()))
    }
}

/// The cipher suites. AES-128-GCM first: strong enough, and up to 5 % cheaper than AES-256. ChaCha20 costs twice as
/// much and is for processors without AES instructions.
fn crypto_provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![
        aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
        aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(provider)
}

/// Accepts clients with any well-formed certificate, or without one. The handshake's signature proves that the client
/// holds the private key; access is decided at its `Hello`.
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ClientCertVerifier for AnyKey {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        webpki::EndEntityCert::try_from(end_entity).map_err(|_| CertificateError::BadEncoding)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// Accepts a server whose public key is in the ticket; ignores everything else in its certificate. The handshake's
/// signature proves that the server holds the private key, so this is as strong as the ticket is authentic.
#[derive(Debug)]
struct PinnedKey {
    keys: Box<[Fingerprint]>,
    rejected_key: Arc<OnceLock<Fingerprint>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PinnedKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate =
            webpki::EndEntityCert::try_from(end_entity).map_err(|_| CertificateError::BadEncoding)?;
        let found = Fingerprint::of(&certificate.subject_public_key_info());
        if self.keys.contains(&found) {
            return Ok(ServerCertVerified::assertion());
        }
        let _ = self.rejected_key.set(found);
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        None
    }
}
