//! A peer that speaks raw QUIC and can send arbitrary bytes.

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{
    CertificateError, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};
use tensor_relay_protocol::{
    ALPN, ClientMessage, CloseCode, CodecSet, FeatureSet, Hello, InstanceId, LaneOffer, ServerMessage,
    Subscribe, SubscriptionId, Welcome, decode_frame_length, encode_client, encode_server,
};
use tensor_relay_tests::{
    pair::{Sim, token, topic},
    simnet::Host,
};
use tensor_relay_transport::Network;

/// The instance of a scripted server.
pub(crate) const INSTANCE: InstanceId = InstanceId([8; 16]);

/// One endpoint of a connection, with its control stream.
pub(crate) struct Peer {
    pub(crate) connection: quinn::Connection,
    control_out: quinn::SendStream,
    control_in: quinn::RecvStream,
    endpoint: quinn::Endpoint,
}

/// Connects to the server without opening a control stream.
pub(crate) async fn connect(sim: &Sim, number: u8) -> (quinn::Endpoint, quinn::Connection) {
    connect_with_tls(sim, number, client_tls(aws_lc_rs::default_provider())).await
}

/// Connects with a custom TLS configuration.
pub(crate) async fn connect_with_tls(
    sim: &Sim,
    number: u8,
    tls: rustls::ClientConfig,
) -> (quinn::Endpoint, quinn::Connection) {
    let endpoint = endpoint(&sim.client_host(number), 0, None);
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let connecting = endpoint.connect_with(config, sim.server_address(), "tensor-relay");
    let connection = connecting.unwrap().await.unwrap();
    (endpoint, connection)
}

impl Peer {
    /// A client that has sent nothing yet.
    pub(crate) async fn client(sim: &Sim, number: u8) -> Self {
        let (endpoint, connection) = connect(sim, number).await;
        let (control_out, control_in) = connection.open_bi().await.unwrap();
        Self { connection, control_out, control_in, endpoint }
    }

    /// A client that has received `Welcome`.
    pub(crate) async fn welcomed_client(sim: &Sim, number: u8) -> Self {
        let mut peer = Self::client(sim, number).await;
        peer.send_to_server(ClientMessage::Hello(hello())).await;
        assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
        peer
    }

    /// A server whose first client was sent `Welcome` and has subscribed.
    pub(crate) async fn server(sim: &Sim) -> (Self, Subscribe) {
        Self::server_offering(sim, None).await
    }

    /// A server like [`Peer::server`] that offers `lanes`.
    pub(crate) async fn server_offering(sim: &Sim, lanes: Option<LaneOffer>) -> (Self, Subscribe) {
        let (host, port) = (sim.server_host(), sim.server_address().port());
        Self::accept(endpoint(&host, port, Some(server_config(sim))), lanes).await
    }

    /// Accepts the next lane of the client; returns it with its first message.
    pub(crate) async fn accept_further_lane(&self) -> (Self, ClientMessage) {
        let connection = self.endpoint.accept().await.unwrap().await.unwrap();
        let (control_out, control_in) = connection.accept_bi().await.unwrap();
        let mut lane = Self { connection, control_out, control_in, endpoint: self.endpoint.clone() };
        let message = lane.receive_from_client().await;
        (lane, message)
    }

    /// Closes this connection, as a restarting server does; returns the client's next connection.
    pub(crate) async fn reconnect(self) -> (Self, Subscribe) {
        self.connection.close(CloseCode::ShuttingDown.code().into(), b"");
        Self::accept(self.endpoint, None).await
    }

    async fn accept(endpoint: quinn::Endpoint, lanes: Option<LaneOffer>) -> (Self, Subscribe) {
        let connection = endpoint.accept().await.unwrap().await.unwrap();
        let (control_out, control_in) = connection.accept_bi().await.unwrap();
        let mut peer = Self { connection, control_out, control_in, endpoint };
        assert!(matches!(peer.receive_from_client().await, ClientMessage::Hello(_)));
        let agent = "hostile".into();
        let welcome = Welcome {
            revision: 1,
            agent,
            session: 1,
            subscriptions_max: 64,
            lanes,
            instance: INSTANCE,
            lane_addresses: vec![],
            features: FeatureSet::default(),
        };
        peer.send_to_client(ServerMessage::Welcome(welcome)).await;
        match peer.receive_from_client().await {
            ClientMessage::Subscribe(subscribe) => (peer, subscribe),
            other => panic!("{other:?}"),
        }
    }

    /// Finishes the sending direction of the control stream.
    pub(crate) fn finish_control(&mut self) {
        self.control_out.finish().unwrap();
    }

    /// Stops the receiving direction of the control stream.
    pub(crate) fn stop_receiving(&mut self) {
        self.control_in.stop(0u32.into()).unwrap();
    }

    pub(crate) async fn send_to_server(&mut self, message: ClientMessage) {
        self.send_bytes(&encode_client(message)).await;
    }

    pub(crate) async fn send_to_client(&mut self, message: ServerMessage) {
        self.send_bytes(&encode_server(message)).await;
    }

    /// Writes to the control stream. Errors are ignored: the tested side may have closed the connection, as it should.
    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) {
        let _ = self.control_out.write_all(bytes).await;
    }

    pub(crate) async fn receive_from_server(&mut self) -> ServerMessage {
        ServerMessage::decode(&self.receive_frame().await).unwrap()
    }

    pub(crate) async fn receive_from_client(&mut self) -> ClientMessage {
        ClientMessage::decode(&self.receive_frame().await).unwrap()
    }

    async fn receive_frame(&mut self) -> Vec<u8> {
        let mut prefix = [0; 4];
        self.control_in.read_exact(&mut prefix).await.unwrap();
        let mut body = vec![0; decode_frame_length(prefix).unwrap()];
        self.control_in.read_exact(&mut body).await.unwrap();
        body
    }

    /// Sends `parts` as one data stream.
    pub(crate) async fn send_stream(&self, parts: &[&[u8]]) {
        let Ok(mut stream) = self.connection.open_uni().await else {
            return;
        };
        for part in parts {
            let _ = stream.write_all(part).await;
        }
        let _ = stream.finish();
    }

    /// Checks that the tested side sent nothing more before it closed the connection.
    pub(crate) async fn assert_received_nothing(&mut self) {
        let mut any = [0];
        assert!(self.control_in.read(&mut any).await.is_err(), "it sent a message");
        assert!(self.connection.accept_uni().await.is_err(), "it opened a stream");
    }

    /// Waits until the tested side closes the connection, and returns the code and text.
    pub(crate) async fn wait_for_close(&self) -> (Option<CloseCode>, String) {
        wait_for_close(&self.connection).await
    }
}

pub(crate) async fn wait_for_close(connection: &quinn::Connection) -> (Option<CloseCode>, String) {
    match connection.closed().await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let text = String::from_utf8_lossy(&close.reason).into_owned();
            (CloseCode::from_code(close.error_code.into_inner()), text)
        }
        other => panic!("{other}"),
    }
}

pub(crate) fn hello() -> Hello {
    Hello {
        revision_min: 1,
        revision_max: 1,
        agent: "raw".into(),
        codecs: CodecSet::all(),
        token: Some(token()),
        features: FeatureSet::default(),
    }
}

pub(crate) fn subscribe(id: u32, credit: u32) -> ClientMessage {
    ClientMessage::Subscribe(Subscribe::latest(SubscriptionId(id), topic("t"), credit))
}

fn endpoint(host: &Host, port: u16, server: Option<quinn::ServerConfig>) -> quinn::Endpoint {
    let address: SocketAddr = (Ipv4Addr::UNSPECIFIED, port).into();
    let socket = host.bind(address, &Default::default()).unwrap();
    let mut config = quinn::EndpointConfig::default();
    config.rng_seed(host.rng_seed());
    quinn::Endpoint::new_with_abstract_socket(config, server, socket, host.runtime()).unwrap()
}

fn server_config(sim: &Sim) -> quinn::ServerConfig {
    let key = sim.key_pair();
    let params = rcgen::CertificateParams::new(vec!["tensor-relay".into()]).unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let mut tls = rustls::ServerConfig::builder_with_provider(aws_lc_rs::default_provider().into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()))
}

/// The TLS configuration of a client that accepts any server.
pub(crate) fn client_tls(provider: CryptoProvider) -> rustls::ClientConfig {
    let mut tls = rustls::ClientConfig::builder_with_provider(provider.into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate))
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls
}

/// Accepts any server certificate.
#[derive(Debug)]
struct AcceptAnyCertificate;

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
        Err(CertificateError::BadSignature.into())
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
        vec![SignatureScheme::ED25519]
    }
}
