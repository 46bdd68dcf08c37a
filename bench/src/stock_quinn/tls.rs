//! Encryption without trust: real packets, a certificate of no meaning.

use anyhow::Result;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{
        CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
    },
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    version::TLS13,
};
use std::sync::Arc;

/// What the server's certificate says, and the client asks for.
pub(super) const SERVER_NAME: &str = "localhost";

/// A server with a certificate made on the spot.
pub(super) fn server() -> Result<QuicServerConfig> {
    let made = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config.try_into()?)
}

/// A client that accepts whoever answers.
pub(super) fn client() -> Result<QuicClientConfig> {
    let provider = provider();
    let anyone = AcceptAnyone(provider.signature_verification_algorithms);
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(anyone))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config.try_into()?)
}

/// AES-128-GCM alone, of aws-lc-rs: ring was up to 10 % slower, ChaCha20 half as fast.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..aws_lc_rs::default_provider()
    })
}

/// Takes any certificate: the rival runs on loopback and test networks, and carries noise.
#[derive(Debug)]
struct AcceptAnyone(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AcceptAnyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

const ALPN: &[u8] = b"stock-quinn";
