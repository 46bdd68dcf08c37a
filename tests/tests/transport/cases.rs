//! The cases that every kind of lane must pass.

use crate::fixture::{ALL, Backend, NETWORK, run_on};
use bytes::Bytes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{Capacity, HostMemory, HostSink, Region, SlotPool};
use tensor_relay_protocol::{
    ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, Dtype, Epoch, Limits, Manifest,
    ServerMessage, StreamHeader, Subscribe, SubscriptionId, Topic, Version,
};
use tensor_relay_tests::tensors;
use tensor_relay_transport::{
    DataIn, Lane, LaneError, LaneKind, Progress, Workers, control, egress,
    egress::Encoded,
    ingress::{self, Ingress, ReceiveError},
};
use tokio::sync::Notify;

/// The deadline of opening a control stream, and of a message on it.
const DEADLINE: Duration = Duration::from_secs(10);

/// The size of a chunk that no lane buffers completely: Linux lets a receive buffer grow to 32 MiB (`tcp_rmem`).
const LONG_BYTES: u32 = 64 << 20;

const ID: SubscriptionId = SubscriptionId(1);

#[test]
fn control_messages_arrive_in_order_both_ways() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        let ((to_client, mut from_client), (to_server, mut from_server)) = controls(&server, &client).await;
        for credit in 1..200 {
            to_server.send(subscribe(credit)).await.unwrap();
            to_client.send(topics()).await.unwrap();
            assert_eq!(from_client.next().await.unwrap(), subscribe(credit));
            assert_eq!(from_server.next().await.unwrap(), topics());
        }
        to_server.send(subscribe(200)).await.unwrap();
        drop(to_server);
        from_server.flush().await;
        assert_eq!(from_client.next().await.unwrap(), subscribe(200), "a flushed message arrives");
        let ended = from_client.next().await.unwrap_err();
        assert_eq!(
            ended,
            control::ControlError::Lane(LaneError::StreamAborted),
            "only the stream ended, not the lane"
        );
        assert_eq!((server.ended(), client.ended()), (None, None));
    });
}

/// Control messages that were queued before a close arrive before it, even after unread data.
#[test]
fn a_close_overtakes_no_control_message() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let closing = async {
            let long = noise(LONG_BYTES, 1);
            let filling = send(&server, 0, &long);
            let _is_full = tokio::time::timeout(Duration::from_millis(200), filling).await.unwrap_err();
            to_client.send(topics()).await.unwrap();
            to_client.send(topics()).await.unwrap();
            to_client.flush().await;
            server.close(CloseCode::ShuttingDown, "");
            while client.accept_data().await.is_ok() {} // Discards the data before the close.
        };
        let receiving = async {
            for _ in 0..2 {
                assert_eq!(from_server.next().await.unwrap(), topics());
            }
            from_server.next().await.unwrap_err()
        };
        let ((), ended) = tokio::join!(closing, receiving);
        let code = Some(CloseCode::ShuttingDown);
        let closed = LaneError::ClosedByPeer { peer: client.peer(), code, text: String::new() };
        assert_eq!(ended, control::ControlError::Lane(closed));
    });
}

#[test]
fn chunks_and_manifests_arrive_intact() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(64 << 20);
        let manifest = manifest(3_000);
        let chunks: Vec<Bytes> = [1, 63, 65_536, 65_537, 3 << 20].map(|bytes| noise(bytes, 7)).into();
        let sending = async {
            egress::send_manifest(&server, ID, &manifest, &|_| ()).await.unwrap();
            for (index, bytes) in chunks.iter().enumerate() {
                send(&server, index as u32, bytes).await.unwrap();
            }
        };
        let receiving = async {
            let mut stream = client.accept_data().await.unwrap();
            let StreamHeader::Manifest(header) = stream.read_header().await.unwrap() else { panic!() };
            let received = ingress::receive_manifest(stream, &header, &Limits::default(), &|_| ()).await;
            assert_eq!(received.unwrap().digest(), manifest.digest());
            for bytes in &chunks {
                let stream = client.accept_data().await.unwrap();
                assert!(receive(stream).await.unwrap() == bytes);
            }
        };
        tokio::join!(sending, receiving);
        let stats = (server.stats(), client.stats());
        assert!(stats.0.sent_bytes > 3 << 20 && stats.1.received_bytes > 3 << 20, "{stats:?}");
        assert!(stats.1.rtt > Duration::ZERO, "{stats:?}");
    });
}

/// Chunks that several tasks send concurrently arrive intact, and a control message between them.
#[test]
fn chunks_sent_concurrently_arrive_intact() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(64 << 20);
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let mut sending = tokio::task::JoinSet::new();
        for chunk in 0..8 {
            let server = server.clone();
            sending.spawn(async move { send(&server, chunk, &noise(1 << 20, chunk)).await.map(drop) });
        }
        to_client.send(topics()).await.unwrap();
        let receiving_control = async { from_server.next().await.unwrap() };
        let receiving = async {
            for _ in 0..8 {
                let mut stream = client.accept_data().await.unwrap();
                let header = chunk_header(&mut stream).await;
                assert!(gather(stream, &header).await.unwrap() == noise(1 << 20, header.chunk.0));
            }
        };
        tokio::join!(receiving_control, receiving);
        while let Some(sent) = sending.join_next().await {
            sent.unwrap().unwrap();
        }
    });
}

/// A control message arrives although the server has used all its credit and the client reads none of these chunks.
/// Otherwise a client that waits for an announcement before it reads chunks would wait forever. Before that, the client
/// reads one smaller chunk: for so few bytes quinn does not extend the server's window yet.
#[test]
fn unread_chunks_never_block_the_control_stream() {
    const CREDIT_CHUNKS: u32 = 8;
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(u64::from(CREDIT_CHUNKS) * (4 << 20));
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let first = noise(3 << 20, 1);
        let reading = async { receive(client.accept_data().await.unwrap()).await.unwrap() };
        let (sent, read) = tokio::join!(send(&server, 0, &first), reading);
        assert!(sent.is_ok() && read == first);

        let chunk = noise(4 << 20, 2);
        let mut sending = tokio::task::JoinSet::new();
        for index in 1..=CREDIT_CHUNKS {
            let (server, chunk) = (server.clone(), chunk.clone());
            sending.spawn(async move { send(&server, index, &chunk).await });
        }
        // Until the windows are full.
        tokio::time::sleep(Duration::from_secs(2)).await;
        to_client.send(topics()).await.unwrap();
        let received = tokio::time::timeout(DEADLINE, from_server.next()).await;
        assert_eq!(received.expect("chunks block the control stream").unwrap(), topics());
        for _ in 0..CREDIT_CHUNKS {
            assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == chunk);
        }
        while let Some(sent) = sending.join_next().await {
            sent.unwrap().unwrap();
        }
    });
}

/// A chunk whose sender cancels it midway is an error at the receiver; later chunks arrive.
#[test]
fn a_chunk_cancelled_midway_is_never_complete() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(LONG_BYTES.into());
        let begun = Notify::new();
        let cancelling = async {
            let bytes = noise(LONG_BYTES, 1);
            let encoded = encoded(&bytes);
            let sent_bytes = AtomicU64::new(0);
            let progress = |piece| {
                if sent_bytes.fetch_add(piece, Ordering::Relaxed) + piece >= 1 << 20 {
                    begun.notify_one();
                }
            };
            let sending = egress::send_chunk(&server, header(0, &bytes), &encoded, &progress);
            tokio::select! {
                biased;
                () = begun.notified() => {}
                _ = sending => panic!("the chunk exceeds the buffers"),
            }
            send(&server, 1, &noise(100_000, 2)).await.unwrap();
        };
        let receiving = async {
            for _ in 0..2 {
                let Ok(mut stream) = client.accept_data().await else { panic!("the lane lives") };
                let Ok(StreamHeader::Chunk(header)) = stream.read_header().await else { continue };
                match (header.chunk.0, gather(stream, &header).await) {
                    (0, Err(ReceiveError::Lane(LaneError::StreamAborted))) => {}
                    (1, Ok(bytes)) => assert!(bytes == noise(100_000, 2)),
                    (chunk, other) => panic!("{chunk}: {:?}", other.map(|bytes| bytes.len())),
                }
            }
        };
        tokio::join!(cancelling, receiving);
        assert_eq!((server.ended(), client.ended()), (None, None));
    });
}

/// A stream with more or fewer bytes than its header says is an error; later chunks arrive.
#[test]
fn a_chunk_of_a_wrong_length_is_rejected() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(64 << 20);
        let bytes = noise(3 << 20, 1);
        for promised in [1, 3 << 19, 3_145_727, 3_145_729, 4 << 20] {
            let promise = ChunkHeader { raw_bytes: promised, encoded_bytes: promised, ..header(0, &bytes) };
            let encoded = encoded(&bytes);
            let sending = async {
                // A receiver of too many bytes stops the stream.
                let sent = egress::send_chunk(&server, promise, &encoded, &|_| ()).await;
                assert!(matches!(sent, Ok(()) | Err(LaneError::StreamAborted)), "{sent:?}");
            };
            let receiving = async {
                match receive(client.accept_data().await.unwrap()).await {
                    Err(ReceiveError::WrongLength { expected, found, .. }) => {
                        assert_eq!(expected, promised as usize);
                        assert_eq!(found > expected, bytes.len() > expected, "{found} of {expected}");
                    }
                    other => panic!("{promised}: {:?}", other.map(|bytes| bytes.len())),
                }
            };
            tokio::join!(sending, receiving);
            let (_, received) = tokio::join!(async { send(&server, 1, &bytes).await.unwrap() }, async {
                receive(client.accept_data().await.unwrap()).await.unwrap()
            },);
            assert!(received == bytes);
        }
        assert_eq!((server.ended(), client.ended()), (None, None));
    });
}

/// A receiver that cancels a chunk midway can immediately receive into the same range again.
#[test]
fn a_cancelled_receive_releases_its_range_immediately() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(LONG_BYTES.into());
        let bytes = noise(LONG_BYTES, 1);
        let sending = async {
            for chunk in 0..4 {
                let sent = send(&server, chunk, &bytes).await;
                assert!(matches!(sent, Ok(()) | Err(LaneError::StreamAborted)), "{sent:?}");
            }
        };
        let receiving = async {
            let slots = SlotPool::new(Capacity { slots: 1, slot_bytes: 1 }).unwrap();
            let ingress = Ingress::new(slots, Workers::Inline);
            let region = HostMemory::new(u64::MAX).allocate(LONG_BYTES as usize).unwrap();
            let sink = Arc::new(HostSink::new(region));
            for chunk in 0..4 {
                let mut stream = client.accept_data().await.unwrap();
                let header = chunk_header(&mut stream).await;
                let (progressed, range) = (Arc::new(Notify::new()), 0..u64::from(LONG_BYTES));
                let notified = Arc::clone(&progressed);
                let progress: Progress = Arc::new(move |_| notified.notify_one());
                let gathering = ingress.gather_chunk(stream, &header, range, &*sink, &progress, None);
                tokio::select! {
                    biased;
                    () = progressed.notified(), if chunk < 3 => {}
                    gathered = gathering => {
                        assert_eq!(chunk, 3, "the chunk exceeds the buffers");
                        let finished = ingress.finish_chunk(gathered.unwrap(), Dtype::U8, &*sink, None, None).await;
                        assert_eq!(finished.unwrap().0.hash(), header.hash);
                    }
                }
            }
        };
        tokio::join!(sending, receiving);
        assert_eq!((server.ended(), client.ended()), (None, None));
    });
}

/// A sender is informed that its receiver dropped a chunk; later chunks arrive.
#[test]
fn a_receiver_can_stop_a_chunk() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        let sending = async {
            let outcome = send(&server, 0, &noise(LONG_BYTES, 1)).await;
            assert_eq!(outcome.map(drop), Err(LaneError::StreamAborted));
            send(&server, 1, &noise(100_000, 2)).await.unwrap();
        };
        let receiving = async {
            let mut stream = client.accept_data().await.unwrap();
            stream.read_header().await.unwrap();
            drop(stream);
            assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == noise(100_000, 2));
        };
        tokio::join!(sending, receiving);
        assert_eq!((server.ended(), client.ended()), (None, None));
    });
}

/// A close arrives with its code and its text, even after unread data; its sender can wait for the arrival.
#[test]
fn the_peer_receives_the_close_code_and_text() {
    run_on(&ALL, async |fixture| {
        for by_server in [true, false] {
            let (server, client) = fixture.lane().await;
            client.allow_unread(1 << 20);
            send(&server, 0, &noise(1 << 20, 1)).await.unwrap();
            let _unread = client.accept_data().await.unwrap();
            let (closing, other) = if by_server { (&server, &client) } else { (&client, &server) };
            closing.flush().await;
            closing.close(CloseCode::ShuttingDown, "back at ten\n");
            closing.close(CloseCode::Internal, "too late");
            assert_eq!(closing.ended(), Some(LaneError::ClosedLocally));
            assert_eq!(closing.open_data(0).await.unwrap_err(), LaneError::ClosedLocally);
            let error = tokio::join!(other.closed(), closing.flush_close()).0;
            let (code, text) = (Some(CloseCode::ShuttingDown), r"back at ten\n".to_owned());
            assert_eq!(error, LaneError::ClosedByPeer { peer: other.peer(), code, text });
            assert_eq!(other.accept_data().await.err(), Some(error));
        }
    });
}

/// Dropping the last clone closes a lane; closing a listener closes all its lanes.
#[test]
fn a_lane_closes_with_its_last_handle_or_its_listener() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        drop(client);
        assert!(matches!(server.closed().await, LaneError::ClosedByPeer { code: Some(CloseCode::Done), .. }));

        let (server, client) = fixture.lane().await;
        fixture.listener.close(CloseCode::ShuttingDown);
        let error = client.closed().await;
        assert!(
            matches!(error, LaneError::ClosedByPeer { code: Some(CloseCode::ShuttingDown), .. }),
            "{error}"
        );
        assert_eq!(server.closed().await, LaneError::ClosedLocally);
        assert!(fixture.listener.accept().await.is_none());
        drop((server, client));
        fixture.listener.wait_idle().await;
    });
}

/// Both ends detect a peer that vanishes without a close; an idle lane stays open.
#[test]
fn a_vanished_peer_times_out() {
    run_on(&ALL, async |fixture| {
        let (server, client) = fixture.lane().await;
        let idle = Duration::from_millis(fixture.connector.tuning().idle_timeout_ms.into());
        tokio::time::sleep(idle * 2).await;
        assert_eq!((server.ended(), client.ended()), (None, None), "pings keep the lane open");
        fixture.blackhole();
        let (at_server, at_client) = tokio::join!(server.closed(), client.closed());
        assert_eq!(at_server, LaneError::TimedOut { peer: server.peer() });
        assert_eq!(at_client, LaneError::TimedOut { peer: client.peer() });
    });
}

#[test]
fn further_lanes_have_the_same_kind() {
    run_on(&NETWORK, async |fixture| {
        let (first, _) = fixture.lane().await;
        let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
        let keys = [fixture.key];
        let (server, client) = tokio::join!(
            accepting,
            fixture.connector.connect_further(fixture.address, &keys, 3, first.kind())
        );
        let client = client.unwrap();
        assert_eq!((client.number(), client.kind(), server.kind()), (3, first.kind(), first.kind()));
        let is_quic = fixture.backend == Backend::SimulatedQuic;
        assert_eq!(client.kind(), if is_quic { LaneKind::Quic } else { LaneKind::Tcp });
        send(&server, 0, &noise(100_000, 2)).await.unwrap();
        let receiving = client.clone();
        let received = async move { receive(receiving.accept_data().await.unwrap()).await };
        assert!(client.run(received).await.unwrap().unwrap() == noise(100_000, 2));
    });
}

pub(crate) type Controls<Out, In> = (control::Sender<Out>, control::Receiver<In>);

/// Opens the control stream; returns both ends. Over QUIC, the server sees it only once the client has sent bytes.
pub(crate) async fn controls(
    server: &Lane,
    client: &Lane,
) -> (Controls<ServerMessage, ClientMessage>, Controls<ClientMessage, ServerMessage>) {
    let at_client = control::open(client, DEADLINE).await.unwrap();
    at_client.0.send(subscribe(4_000)).await.unwrap();
    let mut at_server = control::accept(server, DEADLINE).await.unwrap();
    assert_eq!(at_server.1.next().await.unwrap(), subscribe(4_000));
    (at_server, at_client)
}

pub(crate) fn topics() -> ServerMessage {
    ServerMessage::Topics { topics: vec![], more: false }
}

pub(crate) fn subscribe(credit: u32) -> ClientMessage {
    ClientMessage::Subscribe(Subscribe::latest(ID, Topic::new("t").unwrap(), credit))
}

fn manifest(tensors: u32) -> Manifest {
    let specs = (0..tensors)
        .map(|tensor| tensors::noise(&format!("tensor.{tensor}"), 100))
        .collect();
    Manifest::layout(specs, vec![], 65_536, &Limits::default()).unwrap()
}

/// Incompressible bytes, different for each `version`.
pub(crate) fn noise(bytes: u32, version: u32) -> Bytes {
    let mut out = vec![0; bytes as usize];
    tensors::write_content("noise", version.into(), &mut out);
    out.into()
}

fn header(chunk: u32, bytes: &Bytes) -> ChunkHeader {
    ChunkHeader {
        subscription: ID,
        epoch: Epoch(1),
        version: Version(1),
        chunk: ChunkIndex(chunk),
        codec: CodecId::Raw,
        raw_bytes: bytes.len() as u32,
        encoded_bytes: bytes.len() as u32,
        hash: ChunkHash::of(bytes),
        base: None,
    }
}

fn encoded(bytes: &Bytes) -> Encoded {
    let hash = ChunkHash::of(bytes);
    Encoded { codec: CodecId::Raw, hash, bytes: bytes.clone(), worker_time: Duration::ZERO }
}

/// Sends `bytes` as the chunk with this number.
pub(crate) async fn send(lane: &Lane, chunk: u32, bytes: &Bytes) -> Result<(), LaneError> {
    egress::send_chunk(lane, header(chunk, bytes), &encoded(bytes), &|_| ()).await
}

async fn chunk_header(stream: &mut DataIn) -> ChunkHeader {
    match stream.read_header().await.unwrap() {
        StreamHeader::Chunk(header) => header,
        other => panic!("{other:?}"),
    }
}

/// Receives and verifies a chunk.
pub(crate) async fn receive(mut stream: DataIn) -> Result<Bytes, ReceiveError> {
    let header = chunk_header(&mut stream).await;
    gather(stream, &header).await
}

async fn gather(stream: DataIn, header: &ChunkHeader) -> Result<Bytes, ReceiveError> {
    let slots = SlotPool::new(Capacity { slots: 1, slot_bytes: 1 }).unwrap();
    let ingress = Ingress::new(slots, Workers::Inline);
    let region = HostMemory::new(u64::MAX).allocate(header.raw_bytes as usize).unwrap();
    let sink = Arc::new(HostSink::new(region));
    let range = 0..u64::from(header.raw_bytes);
    let progress: Progress = Arc::new(|_| ());
    let gathered = ingress.gather_chunk(stream, header, range, &*sink, &progress, None).await?;
    let (verified, _) = ingress.finish_chunk(gathered, Dtype::U8, &*sink, None, None).await?;
    assert_eq!(verified.hash(), header.hash);
    Ok(sink.commit()?.into_iter().next().map(Region::freeze).unwrap_or_default())
}
