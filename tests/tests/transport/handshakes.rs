//! Handshakes that succeed or are refused, and errors of connecting.

use crate::fixture::{BYTE_STREAMS, Backend, Fixture, NETWORK, run_on};
use std::{net::IpAddr, net::Ipv4Addr, sync::Arc};
use tensor_relay_protocol::ALPN;
use tensor_relay_transport::{
    ByteStream, ConnectError, Fingerprint, LaneError, LaneKind, Network, SystemNetwork,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

#[test]
fn a_server_with_another_key_is_refused() {
    run_on(&NETWORK, async |fixture| {
        let (server, client) = fixture.connect(&[Fingerprint([7; 32]), Fingerprint([8; 32])]).await;
        let Err(ConnectError::WrongKey { address, found, expected }) = client else { panic!("{client:?}") };
        assert_eq!((address, found), (fixture.address, fixture.key));
        assert!(expected.contains(" or "), "{expected}");
        assert!(matches!(server, Err(LaneError::Protocol { .. })), "{server:?}");
        assert!(
            fixture.connect(&[Fingerprint([7; 32]), fixture.key]).await.1.is_ok(),
            "one matching key is enough"
        );
    });
}

/// Goal: a certificate, which is public, does not make a server. Method: one with the certificate of the pinned key that
/// signs its handshake with another key.
#[test]
fn a_server_that_does_not_hold_its_key_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        for (signing, is_accepted) in
            [(raw_key_pair(), true), (tensor_relay_tests::pair::key_pair(98), false)]
        {
            let (port, accepting) = raw_server_signing_with(&signing, fixture, vec![ALPN.to_vec()], 0);
            let hosts = [std::net::SocketAddr::new(fixture.address.ip(), port).to_string()];
            let keys = [Fingerprint(raw_key())];
            let (client, server) = tokio::join!(fixture.connector.connect(&hosts, &keys), accepting);
            assert_eq!((client.is_ok(), server.is_ok()), (is_accepted, is_accepted), "{client:?}");
        }
    });
}

#[test]
fn a_client_of_another_protocol_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        for protocols in [vec![b"h2".to_vec()], vec![]] {
            let accepting = async { fixture.listener.accept().await.unwrap().accept().await };
            let (server, client) = tokio::join!(accepting, raw_client(fixture, protocols.clone()));
            assert!(matches!(server, Err(LaneError::Protocol { .. })), "{protocols:?}: {server:?}");
            drop(client);
        }
        let (server, client) = fixture.lane().await;
        assert_eq!((server.ended(), client.ended()), (None, None), "another client can still connect");
    });
}

#[test]
fn a_server_of_another_protocol_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        for protocols in [vec![b"h2".to_vec()], vec![]] {
            let (port, accepting) = raw_server(fixture, protocols, 0);
            let address = std::net::SocketAddr::new(fixture.address.ip(), port);
            let hosts = [address.to_string()];
            let key = Fingerprint(raw_key());
            let keys = [key];
            let (client, _) = tokio::join!(fixture.connector.connect(&hosts, &keys), accepting);
            assert!(
                matches!(client, Err(ConnectError::Incompatible { address: a }) if a == address),
                "{client:?}"
            );
        }
    });
}

#[test]
fn a_refused_client_gets_an_error() {
    run_on(&NETWORK, async |fixture| {
        let hosts = [fixture.address.to_string()];
        let keys = [fixture.key];
        let refusing = async { fixture.listener.accept().await.unwrap().refuse() };
        let (client, ()) = tokio::join!(fixture.connector.connect(&hosts, &keys), refusing);
        assert!(matches!(client, Err(ConnectError::Refused { .. })), "{client:?}");
    });
}

#[test]
fn a_closed_port_is_an_error() {
    run_on(&BYTE_STREAMS, async |fixture| {
        let keys = [fixture.key];
        let Fixture { connector, address, .. } = fixture;
        // No test listens on port 1.
        let unused = std::net::SocketAddr::new(address.ip(), 1).to_string();
        let error = connector.connect(std::slice::from_ref(&unused), &keys).await.unwrap_err();
        let ConnectError::TcpFailed { addresses, detail } = &error else { panic!("{error}") };
        assert_eq!(addresses, &unused);
        assert!(detail.contains("refused"), "{detail}");
        let error = connector
            .connect_further(unused.parse().unwrap(), &keys, 1, LaneKind::Tcp)
            .await
            .unwrap_err();
        assert!(matches!(error, ConnectError::TcpFailed { .. }), "{error}");
    });
}

/// Goal: over TCP too, connecting to a silent server ends at the connect timeout.
#[test]
fn a_silent_server_times_out() {
    run_on(&[Backend::SimulatedStream], async |fixture| {
        fixture.blackhole();
        let keys = [fixture.key];
        let sim = fixture.sim.as_ref().unwrap();
        let began = sim.elapsed();
        let first = fixture
            .connector
            .connect(&[fixture.address.to_string()], &keys)
            .await
            .unwrap_err();
        let further = fixture.connector.connect_further(fixture.address, &keys, 1, LaneKind::Tcp);
        let further = further.await.unwrap_err();
        let ConnectError::TcpFailed { detail, .. } = &first else { panic!("{first}") };
        assert_eq!(detail, "no answer within 10000 ms");
        let is_unreachable =
            matches!(further, ConnectError::FurtherUnreachable { lane: 1, kind: LaneKind::Tcp, .. });
        assert!(is_unreachable, "{further}");
        assert_eq!((sim.elapsed() - began).as_secs(), 20);
    });
}

/// Goal: a port in use over TCP is reported as such; port 0 selects one that is free over both UDP and TCP.
#[test]
fn udp_and_tcp_share_one_port() {
    use tensor_relay_transport::{BindError, Identity, Listener, Tuning};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (identity, localhost) = (Identity::ephemeral().unwrap(), IpAddr::from(Ipv4Addr::LOCALHOST));
        let taken = std::net::TcpListener::bind((localhost, 0)).unwrap();
        let address = taken.local_addr().unwrap();
        let bound = Listener::bind(address, &identity, Tuning::default());
        assert!(matches!(bound, Err(BindError::TcpInUse { address: a }) if a == address), "{bound:?}");
        let both = Listener::bind((localhost, 0).into(), &identity, Tuning::default()).unwrap();
        let port = both.local_address().port();
        assert!(std::net::UdpSocket::bind((localhost, port)).is_err());
        assert!(std::net::TcpListener::bind((localhost, port)).is_err());
    });
}

/// Connects to the fixture's server over TLS, with these ALPN `protocols`, and accepts any certificate.
pub(crate) async fn raw_client(
    fixture: &Fixture,
    protocols: Vec<Vec<u8>>,
) -> std::io::Result<TlsStream<Box<dyn ByteStream>>> {
    let mut config =
        rustls::ClientConfig::builder_with_provider(rustls::crypto::aws_lc_rs::default_provider().into())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(accept_any::AcceptAnyCertificate))
            .with_no_client_auth();
    config.alpn_protocols = protocols;
    let stream = network(fixture, false)
        .connect(Ipv4Addr::UNSPECIFIED.into(), fixture.address, None)
        .await?;
    TlsConnector::from(Arc::new(config))
        .connect("tensor-relay".try_into().unwrap(), stream)
        .await
}

/// Connects as [`raw_client`] does, with the ALPN identifier of this protocol.
pub(crate) async fn raw_peer(fixture: &Fixture) -> TlsStream<Box<dyn ByteStream>> {
    raw_client(fixture, vec![ALPN.to_vec()]).await.unwrap()
}

/// Starts a TLS server with these ALPN `protocols` that sends `tickets` session tickets; returns its port, and a future
/// of the first connection's stream.
pub(crate) fn raw_server(
    fixture: &Fixture,
    protocols: Vec<Vec<u8>>,
    tickets: usize,
) -> (u16, impl Future<Output = std::io::Result<tokio_rustls::server::TlsStream<Box<dyn ByteStream>>>>) {
    raw_server_signing_with(&raw_key_pair(), fixture, protocols, tickets)
}

/// Starts a server as [`raw_server`] does, which signs its handshakes with `key`.
fn raw_server_signing_with(
    key: &rcgen::KeyPair,
    fixture: &Fixture,
    protocols: Vec<Vec<u8>>,
    tickets: usize,
) -> (u16, impl Future<Output = std::io::Result<tokio_rustls::server::TlsStream<Box<dyn ByteStream>>>> + use<>)
{
    let params = rcgen::CertificateParams::new(vec!["tensor-relay".into()]).unwrap();
    let certificate = params.self_signed(&raw_key_pair()).unwrap().der().clone();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).unwrap();
    let certified = rustls::sign::CertifiedKey::new(vec![certificate], key); // The key need not match.
    let mut config =
        rustls::ServerConfig::builder_with_provider(rustls::crypto::aws_lc_rs::default_provider().into())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
    config.alpn_protocols = protocols;
    config.send_tls13_tickets = tickets;
    // A free port.
    let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let listener = network(fixture, true).listen((fixture.address.ip(), port).into()).unwrap();
    let accepting = async move {
        let (stream, _) = std::future::poll_fn(|cx| listener.poll_accept(cx)).await?;
        TlsAcceptor::from(Arc::new(config)).accept(stream).await
    };
    (port, accepting)
}

fn network(fixture: &Fixture, is_server: bool) -> Arc<dyn Network> {
    match &fixture.sim {
        Some(sim) if is_server => Arc::new(sim.server_host()),
        Some(sim) => Arc::new(sim.client_host(2)),
        None => Arc::new(SystemNetwork),
    }
}

fn raw_key_pair() -> rcgen::KeyPair {
    tensor_relay_tests::pair::key_pair(99)
}

/// The fingerprint of the key of [`raw_server`].
pub(crate) fn raw_key() -> [u8; 32] {
    let state = tempfile::tempdir().unwrap();
    std::fs::write(state.path().join("identity.key"), raw_key_pair().serialize_pem()).unwrap();
    tensor_relay_transport::Identity::load_or_create(state.path())
        .unwrap()
        .fingerprint()
        .0
}

mod accept_any {
    use rustls::{
        DigitallySignedStruct, Error, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        pki_types::{CertificateDer, ServerName, UnixTime},
    };

    /// Accepts any server certificate.
    #[derive(Debug)]
    pub(super) struct AcceptAnyCertificate;

    impl ServerCertVerifier for AcceptAnyCertificate {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("not TLS 1.2".into()))
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519, SignatureScheme::ECDSA_NISTP256_SHA256]
        }
    }
}
