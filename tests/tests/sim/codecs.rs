//! Codecs of chunks: the automatic choice, and forced codecs.

use std::{sync::Arc, time::Duration};
use tensor_relay_client::{Client, CodecStats, Dtype, Request, Snapshot};
use tensor_relay_protocol::{CodecChoice, CodecId, CodecSet, TensorSpec};
use tensor_relay_server::{Access, Config, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{Sim, client_config, rules, server_config, simulate, topic, transport},
    simnet::Path,
    tensors::{self, noise, smooth, spec, weights},
};
use tensor_relay_transport::{Listener, Transport};

/// Tensors for every choice of codec: floats, compressible and incompressible bytes, and tensors that are too small.
fn mixed() -> Vec<TensorSpec> {
    vec![
        weights("matrix", 500_000),
        noise("quantised", 700_001),
        smooth("text", 300_003),
        spec("noise in f32", Dtype::F32, 100_000),
        noise("scalar", 3),
        weights("bias", 1_000),
    ]
}

async fn publish(server: &Server, options: TopicOptions, specs: Vec<TensorSpec>) {
    let staged = tensors::stage(server, specs, 1);
    let mut publisher = server.publisher_with(topic("t"), None, options).unwrap();
    publisher.publish(staged, tensors::metadata(1)).await.unwrap();
}

async fn receive(client: &Client, request: Request) -> Snapshot {
    let snapshot = client.subscribe_to(request).await.unwrap().next().await.unwrap();
    tensors::check(&snapshot);
    snapshot
}

fn used(codecs: &CodecStats) -> Vec<CodecId> {
    codecs.iter().map(|(codec, _)| codec).collect()
}

/// Goal: each chunk is sent in a fitting codec and arrives intact, server and client report the same, and useless
/// codecs are not tried. Method: tensors of every kind, and three subscribers that share encoded chunks.
#[test]
fn each_chunk_gets_the_codec_that_fits_it() {
    if transport() == Transport::Tcp {
        return println!("skipped over TCP: a first version is not encoded there");
    }
    simulate(1, async |sim: Sim| {
        let server = sim.server(server_config());
        publish(&server, TopicOptions::default(), mixed()).await;
        for number in 1..=3 {
            let client = sim.client(number, client_config()).await.unwrap();
            let snapshot = receive(&client, Request::latest(topic("t"))).await;
            let receipt = snapshot.receipt();
            assert_eq!(used(&receipt.codecs), [CodecId::Raw, CodecId::Zstd, CodecId::BitPlanes]);
            let total = receipt.codecs.total();
            assert_eq!(
                (total.chunks, total.raw_bytes, total.wire_bytes),
                (receipt.chunks.into(), snapshot.payload_bytes(), receipt.wire_bytes)
            );
            let floats = receipt.codecs.of(CodecId::BitPlanes);
            assert!(floats.ratio() > 1.3, "{floats:?}");
            let raw = receipt.codecs.of(CodecId::Raw);
            assert!(raw.raw_bytes > 1_100_000 && raw.raw_bytes == raw.wire_bytes, "{raw:?}");
        }
        let stats = server.stats();
        assert_eq!(stats.encoder.incompressible, 0, "no codec was tried in vain");
        assert_eq!(stats.encoder.requested, 3 * stats.encoder.encoded, "encoded chunks are shared");
        assert_eq!(stats.encoder.estimates, 4, "one estimate for each tensor that is large enough");
        assert_eq!(used(&stats.codecs), [CodecId::Raw, CodecId::Zstd, CodecId::BitPlanes]);
        assert_eq!(server.sent(), [(topic("t"), stats.codecs)]);
    });
}

/// Goal: over TCP a version begins without encoding, and samples of it suffice to begin with that where the path is
/// slow for the processors. Method: a path with a long delay, on which the chunks in flight limit the rate.
#[test]
fn encoding_begins_within_a_version_on_a_slow_path() {
    simulate(1, async |sim: Sim| {
        let delay = Duration::from_millis(20);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
        let listener =
            Listener::bind_on(host, Transport::Tcp, address, &sim.identity(), sim.tuning.clone()).unwrap();
        let server = Server::start(listener, Access::new(rules()), server_config());
        publish(&server, TopicOptions::default(), vec![weights("w", 12 << 20)]).await;
        let config = tensor_relay_client::Config { transport: Transport::Tcp, ..client_config() };
        let connector = sim.connector(1).with_transport(Transport::Tcp);
        let client = Client::connect_with(&connector, &sim.ticket(), config).await.unwrap();
        let snapshot = receive(&client, Request::latest(topic("t"))).await;
        let codecs = snapshot.receipt().codecs;
        assert_eq!(used(&codecs), [CodecId::Raw, CodecId::BitPlanes]);
        let (encoded, estimates) = (server.stats().encoder.encoded, server.stats().encoder.estimates);
        assert_eq!(encoded, codecs.of(CodecId::BitPlanes).chunks, "every encoding is sent");
        assert!(
            estimates * 17 >= codecs.total().chunks && estimates < codecs.total().chunks / 8,
            "{estimates}"
        );
    });
}

/// Goal: a forced codec is used, and no client gets a codec that it cannot decode. Method: combinations of the options
/// of server, topic and subscriber, and the codecs in its `Hello`. `planes` does not shrink repeating bytes.
#[test]
fn a_forced_codec_is_used() {
    let zstd = || TopicOptions { codec: Some(CodecId::Zstd.into()), ..TopicOptions::default() };
    let unset = TopicOptions::default;
    let (all, only_raw) = (CodecSet::all(), CodecSet::only_raw());
    let (auto, raw): (CodecChoice, CodecChoice) = (CodecChoice::Auto, CodecId::Raw.into());
    let chosen: &[CodecId] = match transport() {
        Transport::Tcp => &[CodecId::Raw], // A first version is not encoded over TCP.
        _ => &[CodecId::Raw, CodecId::BitPlanes],
    };
    let cases: [(_, _, _, _, &[CodecId]); 7] = [
        (raw, unset(), None, all, &[CodecId::Raw]),
        (raw, zstd(), None, all, &[CodecId::Zstd]),
        (raw, zstd(), Some(CodecId::Planes), all, &[CodecId::Raw, CodecId::Planes]),
        (auto, unset(), Some(CodecId::Raw), all, &[CodecId::Raw]),
        (auto, zstd(), Some(CodecId::Planes), only_raw, &[CodecId::Raw]),
        (auto, zstd(), None, CodecSet::from_codes(&[3]), &[CodecId::Raw]),
        (auto, unset(), None, CodecSet::from_codes(&[2]), chosen),
    ];
    for (seed, (by_server, options, by_client, offered, expected)) in (1..).zip(cases) {
        simulate(seed, async move |sim: Sim| {
            let server = sim.server(Config { codec: by_server, ..server_config() });
            publish(&server, options, vec![smooth("a", 200_000), weights("b", 100_000)]).await;
            let config = tensor_relay_client::Config { codecs: offered, ..client_config() };
            let client = sim.client(1, config).await.unwrap();
            let request = Request::latest(topic("t"));
            let request = match by_client {
                Some(codec) => request.codec(codec),
                None => request,
            };
            let snapshot = receive(&client, request).await;
            assert_eq!(used(&snapshot.receipt().codecs), expected, "case {seed}");
        });
    }
}
