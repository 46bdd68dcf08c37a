//! Boxes of tensors: a reader of rows or columns receives them alone, whatever happens meanwhile.

use crate::{cut_during, slow_path};
use std::time::Duration;
use tensor_relay_client::{
    Bounds, BoxError, Buffers, Glob, Indices, Request, Shape, Slice, SubscriptionError, TensorBox, TensorName,
};
use tensor_relay_protocol::{Dtype, Epoch, TensorSpec};
use tensor_relay_server::{Server, TopicOptions};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, client_config, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// A layer of a model: two matrices of a megabyte each, a tied table, and small tensors.
pub(crate) fn model() -> Vec<TensorSpec> {
    vec![
        tensors::shaped("steady.q", Dtype::Bf16, &[1024, 512]),
        tensors::shaped("steady.o", Dtype::Bf16, &[512, 1024]),
        tensors::shaped("embed", Dtype::U8, &[256, 1000]),
        TensorSpec { alias_of: Some(2), ..tensors::shaped("head", Dtype::U8, &[256, 1000]) },
        tensors::shaped("norm", Dtype::F32, &[512]),
        tensors::shaped("bias", Dtype::F32, &[8, 3, 5]),
        tensors::shaped("none", Dtype::F32, &[0, 5]),
    ]
}

pub(crate) fn part(tensors: &str, dimension: u32, part: u32, parts: u32) -> TensorBox {
    let slices = vec![Slice { dimension, indices: Indices::Part { part, parts } }];
    TensorBox { tensors: Glob::new(tensors).unwrap(), slices }
}

fn range(tensors: &str, dimension: u32, start: u64, length: u64) -> TensorBox {
    let slices = vec![Slice { dimension, indices: Indices::Range { start, length } }];
    TensorBox { tensors: Glob::new(tensors).unwrap(), slices }
}

async fn publish(server: &Server, publisher: &mut tensor_relay_server::Publisher, version: u64) {
    publish_of(server, publisher, version, model()).await;
}

async fn publish_of(
    server: &Server,
    publisher: &mut tensor_relay_server::Publisher,
    version: u64,
    specs: Vec<TensorSpec>,
) {
    let staged = tensors::stage(server, specs, version);
    let publication = publisher.publish(staged, tensors::metadata(version)).await.unwrap();
    assert_eq!(publication.id().version.0, version);
}

/// Goal: each of eight readers of rows receives its rows, and about an eighth of the bytes; a reader of columns receives
/// its columns from all of the bytes; and the receipt says so.
#[test]
fn rows_are_an_eighth_of_the_bytes() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let specs = vec![tensors::shaped("w", Dtype::Bf16, &[4096, 1024])];
        publish_of(&server, &mut publisher, 1, specs).await;
        let client = sim.client(1, client_config()).await.unwrap();
        for rank in 0..8 {
            for (dimension, most) in [(0, (1 << 20) + u64::from(CHUNK_BYTES)), (1, 8 << 20)] {
                let request = Request::newest(topic("t")).boxes([part("**", dimension, rank, 8)]);
                let snapshot = client.subscribe_to(request).await.unwrap().next().await.unwrap();
                tensors::check(&snapshot);
                let box_of = snapshot.selected("w").unwrap();
                let expected = [[512, 1024], [4096, 128]][dimension as usize];
                assert_eq!(box_of.shape, Shape::new(&expected).unwrap());
                let receipt = snapshot.receipt();
                assert_eq!(receipt.wanted_bytes, 1 << 20);
                assert!(receipt.received_bytes <= most && receipt.wire_bytes <= most, "{receipt:?}");
                assert_eq!(receipt.received_bytes == 8 << 20, dimension == 1);
            }
        }
    });
}

/// Goal: boxes hold with deltas, lost connections, and layouts that change, in both modes.
/// Method: rows, columns, whole tensors, and a tied tensor that is cut differently under each name; every version has
/// bytes of its own; cut the path once in each version that is not sent as deltas.
#[test]
fn boxes_follow_deltas_resumption_and_other_layouts() {
    for (seed, request) in [(1, Request::latest(topic("t"))), (2, Request::every(topic("t")))] {
        simulate(seed, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher_with(topic("t"), Some(Epoch(1)), retaining(3)).unwrap();
            let client = sim.client(1, reconnecting()).await.unwrap();
            let boxes = [
                part("*.q", 0, 3, 4),
                part("*.o", 1, 1, 4),
                part("embed", 0, 0, 2),
                part("hea?", 0, 1, 3), // A name would be missed in a version without it.
                part("bias", 1, 1, 3),
                part("norm", 0, 7, 8),
            ];
            let mut subscription = client.subscribe_to(request.boxes(boxes)).await.unwrap();
            client.list().await.unwrap();
            for version in 1..=6 {
                let specs = match version {
                    5.. => model().into_iter().rev().filter(|spec| spec.alias_of.is_none()).collect(),
                    _ => model(),
                };
                let tensors = specs.len();
                publish_of(&server, &mut publisher, version, specs).await;
                let has_deltas = matches!(version, 3 | 4); // They are over before the path could be cut.
                if !has_deltas {
                    cut_during(&sim, &subscription, version).await;
                }
                let snapshot = subscription.next().await.unwrap();
                assert_eq!(snapshot.id().version.0, version);
                tensors::check(&snapshot);
                assert_eq!(tensors::on_host(&snapshot).tensors().count(), tensors);
                let dimensions = |name| snapshot.selected(name).unwrap().shape.dimensions().to_vec();
                assert_eq!(dimensions("steady.q"), [256, 512]);
                assert_eq!(dimensions("steady.o"), [512, 256]);
                assert_eq!(dimensions("bias"), [8, 1, 5]);
                assert_eq!(dimensions("none"), [0, 5]);
                if has_deltas {
                    let deltas = snapshot.receipt().codecs.deltas();
                    assert!(deltas.chunks > 0, "{:?}", snapshot.receipt());
                }
            }
        });
    }
}

/// Goal: boxes are received into the user's memory, of exactly their size, without a copy; a buffer for another box is
/// refused by name.
#[test]
fn buffers_hold_boxes() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server
            .publisher_with(topic("t"), Some(Epoch(1)), TopicOptions::default())
            .unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut buffers: Buffers<Vec<u8>> = Buffers::new();
        for (name, shape, bounds) in [
            ("steady.q", [1024, 512], Bounds::new([100..300, 0..512])),
            ("steady.o", [512, 1024], Bounds::new([0..512, 17..19])),
            ("embed", [256, 1000], Bounds::new([3..5, 10..700])),
        ] {
            let name = TensorName::new(name).unwrap();
            let dtype = if name.as_str() == "embed" { Dtype::U8 } else { Dtype::Bf16 };
            let shape = Shape::new(&shape).unwrap();
            let bytes = bounds.shape().unwrap().byte_len(dtype).unwrap();
            buffers.insert(name.clone(), vec![0; bytes as usize]);
            buffers.expect_box(name, dtype, shape, bounds);
        }
        let request = Request::latest(topic("t")).select(buffers.selection()).boxes(buffers.boxes());
        let mut subscription = client.subscribe_to(request).await.unwrap();
        for version in 1..=4 {
            let (filled, ()) = tokio::join!(subscription.next_into(buffers), async {
                sleep(Duration::from_millis(10)).await;
                publish(&server, &mut publisher, version).await;
            });
            let filled = filled.unwrap();
            assert!(!filled.was_copied());
            let whole = client
                .subscribe_to(Request::newest(topic("t")))
                .await
                .unwrap()
                .next()
                .await
                .unwrap();
            let request = Request::newest(topic("t")).boxes(filled.buffers().boxes());
            let boxed = client.subscribe_to(request).await.unwrap().next().await.unwrap();
            tensors::check(&boxed);
            for (name, buffer) in filled.buffers().iter() {
                assert_eq!(tensors::on_host(&boxed).tensor(name.as_str()).unwrap(), buffer);
                assert!(whole.selected(name.as_str()).unwrap().byte_len() > buffer.len() as u64);
            }
            buffers = filled.into_buffers();
        }
        let embed = TensorName::new("embed").unwrap();
        let other = Bounds::new([3..5, 11..701]);
        buffers.expect_box(embed, Dtype::U8, Shape::new(&[256, 1000]).unwrap(), other);
        let (refused, ()) = tokio::join!(subscription.next_into(buffers), async {
            publish(&server, &mut publisher, 5).await;
        });
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("embed") && message.contains("[3:5, 11:701]"), "{message}");
    });
}

/// Goal: a box that does not fit is an error by name, before any chunk is sent.
#[test]
fn a_box_that_does_not_fit_is_named_before_a_byte_travels() {
    async fn receive(sim: &Sim, wanted: TensorBox) -> (SubscriptionError, u64) {
        let client = sim.client(1, client_config()).await.unwrap();
        let before = sim.server_sent();
        let mut subscription =
            client.subscribe_to(Request::latest(topic("t")).boxes([wanted])).await.unwrap();
        let error = subscription.next().await.unwrap_err();
        client.list().await.unwrap();
        (error, sim.server_sent() - before)
    }
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1).await;
        for wanted in [range("steady.q", 0, 1000, 25), range("steady.q", 2, 0, 1), range("*", 0, 0, 9)] {
            let (error, sent) = receive(&sim, wanted).await;
            let SubscriptionError::BoxMisfit { source: BoxError::Outside { .. }, .. } = error else {
                panic!("{error}")
            };
            assert!(sent < u64::from(CHUNK_BYTES) / 2, "{sent} bytes were sent");
        }
        let (error, _) = receive(&sim, range("typo", 0, 0, 1)).await;
        assert!(error.to_string().contains("\"typo\""), "{error}");
        assert!(error.is_final());
    });
}
