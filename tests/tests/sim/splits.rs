//! Tensors in pieces: readers of parts receive them and little more, and readers of the whole lose nothing.

use crate::{
    OUTAGE_DURATION,
    boxes::{model, part},
    cut_during, slow_path,
};
use tensor_relay_client::Request;
use tensor_relay_protocol::{Dtype, Epoch, TensorSpec};
use tensor_relay_server::{Borrowed, Publishable, Publisher, Server, Splits};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, client_config, eventually, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

fn split(mut specs: Vec<TensorSpec>, rules: &str) -> Vec<TensorSpec> {
    rules.parse::<Splits>().unwrap().apply(&mut specs).unwrap();
    specs
}

async fn publish(publisher: &mut Publisher, version: u64, staged: impl Into<Publishable>) {
    let publication = publisher.publish(staged, tensors::metadata(version)).await.unwrap();
    assert_eq!(publication.id().version.0, version);
}

/// The tensors of a version, in memory of their own.
fn borrow(server: &Server, specs: Vec<TensorSpec>, version: u64) -> Borrowed {
    let tensors = specs.into_iter().map(|spec| {
        let bytes = if spec.alias_of.is_some() { 0 } else { spec.shape.byte_len(spec.dtype).unwrap() };
        let mut content = vec![0; bytes as usize];
        tensors::write_content(spec.name.as_str(), version, &mut content);
        (spec, bytes::Bytes::from(content))
    });
    Borrowed::from_tensors(&server.staging(), tensors.collect(), vec![]).unwrap()
}

/// Goal: each of eight readers of columns receives an eighth of the bytes of a matrix that is split, staged or borrowed,
/// and a reader of the whole receives all of it.
#[test]
fn columns_of_a_split_matrix_are_an_eighth_of_the_bytes() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let specs = || split(vec![tensors::shaped("w", Dtype::Bf16, &[4096, 1024])], "w=1/8");
        for version in 1..=2 {
            match version {
                1 => publish(&mut publisher, 1, tensors::stage(&server, specs(), 1)).await,
                _ => publish(&mut publisher, 2, borrow(&server, specs(), 2)).await,
            }
            for rank in 0..8 {
                let request = Request::newest(topic("t")).boxes([part("**", 1, rank, 8)]);
                let snapshot = client.subscribe_to(request).await.unwrap().next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!(snapshot.id().version.0, version);
                let receipt = snapshot.receipt();
                assert_eq!((receipt.wanted_bytes, receipt.received_bytes), (1 << 20, 1 << 20), "{receipt:?}");
            }
            let whole = client
                .subscribe_to(Request::newest(topic("t")))
                .await
                .unwrap()
                .next()
                .await
                .unwrap();
            tensors::check(&whole);
            assert_eq!(whole.receipt().received_bytes, 8 << 20);
        }
    });
}

/// Goal: pieces hold with deltas, lost connections and layouts that change, in both modes, for a reader of the whole and
/// for one of boxes along the cuts and across them.
/// Method: every version has bytes of its own, and the later ones are split otherwise; cut the path once in each version
/// that is not sent as deltas.
#[test]
fn pieces_follow_deltas_resumption_and_other_layouts() {
    let rules = ["*.o=1/4", "*.o=1/3", "**=0/2"];
    for (seed, request) in [(1, Request::latest(topic("t"))), (2, Request::every(topic("t")))] {
        for boxes in [vec![], vec![part("*.o", 1, 1, 4), part("*.q", 0, 1, 3), part("bias", 1, 1, 3)]] {
            simulate(seed, async |sim| {
                let server = sim.server(server_config());
                slow_path(&sim);
                let mut publisher = server.publisher_with(topic("t"), Some(Epoch(1)), retaining(3)).unwrap();
                let client = sim.client(1, reconnecting()).await.unwrap();
                let mut subscription = client.subscribe_to(request.clone().boxes(boxes)).await.unwrap();
                client.list().await.unwrap();
                for version in 1..=7 {
                    let rules = rules[(version as usize - 1) / 3];
                    let staged = tensors::stage(&server, split(model(), rules), version);
                    assert!(staged.manifest().tensors().iter().any(|tensor| tensor.is_in_pieces()));
                    publish(&mut publisher, version, staged).await;
                    let has_deltas = matches!(version, 3 | 6); // They are over before the path could be cut.
                    if !has_deltas {
                        cut_during(&sim, &subscription, version).await;
                    }
                    let snapshot = subscription.next().await.unwrap();
                    assert_eq!(snapshot.id().version.0, version);
                    tensors::check(&snapshot);
                    if has_deltas {
                        let deltas = snapshot.receipt().codecs.deltas();
                        assert!(deltas.chunks > 0, "{version}: {:?}", snapshot.receipt());
                    }
                }
            });
        }
    }
}

/// Goal: where a version is resumed, whole readers of pieces receive no verified chunk again.
#[test]
fn a_resumed_version_in_pieces_sends_what_is_missing() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, reconnecting()).await.unwrap();
        let specs = split(vec![tensors::shaped("w", Dtype::Bf16, &[1024, 1024])], "w=1/4");
        let mut subscription = client.subscribe_to(Request::latest(topic("t"))).await.unwrap();
        client.list().await.unwrap();
        publish(&mut publisher, 1, tensors::stage(&server, specs, 1)).await;
        eventually("half of it arrived", || subscription.progress().verified_bytes > 1 << 20).await;
        let before = sim.server_sent();
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        sim.mend(1);
        let snapshot = subscription.next().await.unwrap();
        tensors::check(&snapshot);
        let again = sim.server_sent() - before;
        assert!(
            again < (1 << 20) + 16 * u64::from(CHUNK_BYTES),
            "{again} bytes were sent after half had arrived"
        );
    });
}
