//! Versions in memory that a server lends over a Unix socket (PROTOCOL.md §3.19), with real sockets and memory.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tensor_relay_client::{
    Buffers, Client, Glob, Indices, NotLent, Request, Sharing, Slice, Snapshot, TensorBox, TensorName,
    Ticket, Version,
};
use tensor_relay_server::{Access, Publication, Publisher, Server, TensorSpec};
use tensor_relay_tests::{pair::topic, tensors};
use tensor_relay_transport::{
    Listener, Tuning,
    unix::{self, SocketListener},
};
use tokio::{
    io::Interest,
    net::{UnixListener, UnixStream},
    sync::Notify,
    task::JoinSet,
};

const BYTES: u64 = 1 << 20;

/// A server on a Unix socket alone.
struct Host {
    folder: TempDir,
    server: Server,
}

impl Host {
    fn new(config: tensor_relay_server::Config) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = SocketListener::bind(&folder.path().join("host.sock"), SocketListener::PRIVATE).unwrap();
        let listener = Listener::on_socket(socket, Tuning::default());
        Self { server: Server::start(listener, Access::open(), config), folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("host.sock")
    }

    fn publisher(&self) -> Publisher {
        self.server.publisher(topic("t")).unwrap()
    }

    async fn publish(&self, publisher: &mut Publisher, specs: Vec<TensorSpec>, version: u64) -> Publication {
        let staged = tensors::stage(&self.server, specs, version);
        publisher.publish(staged, tensors::metadata(version)).await.unwrap()
    }

    async fn taker(&self) -> Client {
        taker_of(&self.socket()).await
    }

    /// Waits until no memory is lent.
    async fn wait_until_released(&self) {
        eventually(|| self.server.stats().lent_bytes == 0).await;
    }
}

async fn taker_of(socket: &Path) -> Client {
    let ticket: Ticket = format!("unix:{}", socket.display()).parse().unwrap();
    Client::connect(&ticket, tensor_relay_client::Config::default()).await.unwrap()
}

fn config() -> tensor_relay_server::Config {
    tensor_relay_server::Config { chunk_bytes: 64 << 10, ..Default::default() }
}

/// Two tensors of [`BYTES`] bytes together, and an empty one.
fn specs() -> Vec<TensorSpec> {
    vec![tensors::noise("a", BYTES / 2), tensors::noise("b", BYTES / 2), tensors::noise("none", 0)]
}

async fn eventually(mut condition: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within ten seconds");
}

/// Whether the bytes of a tensor lie in a mapping of a memfd of tensor-relay.
fn is_in_memfd(snapshot: &Snapshot, name: &str) -> bool {
    let address = snapshot.tensor(name).unwrap().as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let bound = |text| usize::from_str_radix(text, 16).unwrap();
        (bound(start)..bound(end)).contains(&address)
    });
    line.is_some_and(|line| line.contains("/memfd:tensor-relay"))
}

/// Goal: takers receive the server's memory, all of a version or some of its tensors, without a byte on the socket.
/// Method: two takers, of which one selects a tensor; look at the receipts and at where the bytes lie.
#[tokio::test]
async fn versions_arrive_as_memory() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    let (all, some) = (host.taker().await, host.taker().await);
    let mut all = all.subscribe(&topic("t")).await.unwrap();
    let mut some = {
        let request = Request::latest(topic("t")).select([Glob::new("b").unwrap()]);
        some.subscribe_to(request).await.unwrap()
    };
    for version in 1..=3 {
        host.publish(&mut publisher, specs(), version).await;
        for subscription in [&mut all, &mut some] {
            let snapshot = subscription.next().await.unwrap();
            assert_eq!(snapshot.id().version, Version(version));
            tensors::check(&snapshot);
            assert!(is_in_memfd(&snapshot, "b"));
            let receipt = snapshot.receipt();
            assert_eq!(
                (receipt.sharing, receipt.wire_bytes, receipt.received_bytes),
                (Sharing::Mapped, 0, 0)
            );
        }
        assert!(host.server.stats().lent_bytes >= BYTES);
    }
    drop((all, some));
    host.wait_until_released().await;
}

/// Goal: memory is not written again while anybody maps it, whatever became of its connection; then it is.
/// Method: keep a snapshot beyond its subscription and its client, and publish many versions.
#[tokio::test]
async fn a_snapshot_outlives_its_connection_unchanged() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    host.publish(&mut publisher, specs(), 1).await;
    let client = host.taker().await;
    let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
    client.close().await;
    eventually(|| host.server.stats().sessions == 0).await;
    for version in 2..=9 {
        host.publish(&mut publisher, specs(), version).await;
    }
    assert_eq!(snapshot.id().version, Version(1));
    tensors::check(&snapshot);
    let one = snapshot.tensor("a").unwrap();
    drop(snapshot);
    host.publish(&mut publisher, specs(), 10).await;
    assert!(host.server.stats().lent_bytes > 0, "a slice of it keeps it");
    drop(one);
    host.wait_until_released().await;
}

/// Goal: what cannot be lent arrives in chunks, with the reason.
/// Method: versions that are small, borrowed, and more than the server lends while an earlier one is held.
#[tokio::test]
async fn other_versions_arrive_in_chunks() {
    let host = Host::new(tensor_relay_server::Config { staged_bytes: 4 * BYTES + (1 << 16), ..config() });
    let mut publisher = host.publisher();
    let client = host.taker().await;
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    host.publish(&mut publisher, vec![tensors::noise("a", 1000)], 1).await;
    let small = subscription.next().await.unwrap();
    assert_eq!(small.receipt().sharing, Sharing::Chunks(NotLent::Small));
    tensors::check(&small);

    host.publish(&mut publisher, specs(), 2).await;
    let held = subscription.next().await.unwrap();
    assert_eq!(held.receipt().sharing, Sharing::Mapped);
    host.publish(&mut publisher, specs(), 3).await;
    let chunks = subscription.next().await.unwrap();
    assert_eq!(chunks.receipt().sharing, Sharing::Chunks(NotLent::Full), "there is room for two more");
    tensors::check(&chunks);
    tensors::check(&held);
    drop((held, chunks));
    host.wait_until_released().await;
    host.publish(&mut publisher, specs(), 4).await;
    assert_eq!(subscription.next().await.unwrap().receipt().sharing, Sharing::Mapped);
}

/// Goal: a session may keep only so many loans, since each costs a descriptor of the server.
/// Method: one client that keeps the version of 65 subscriptions.
#[tokio::test]
async fn loans_of_a_session_are_bounded() {
    let host = Host::new(config());
    host.publish(&mut host.publisher(), specs(), 1).await;
    let client = host.taker().await;
    let mut kept = vec![];
    for loans in 1..=65 {
        let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
        let sharing = if loans <= 64 { Sharing::Mapped } else { Sharing::Chunks(NotLent::Full) };
        assert_eq!(snapshot.receipt().sharing, sharing, "{loans}");
        kept.push(snapshot);
    }
}

/// Goal: bytes that belong elsewhere are copied from the memory: to the user's buffers, and to boxes.
/// Method: receive into buffers; request the rows of a tensor, and compare.
#[tokio::test]
async fn bytes_are_copied_to_buffers_and_boxes() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    let client = host.taker().await;
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    let mut buffers = Buffers::new();
    for name in ["a", "b"] {
        buffers.insert(TensorName::new(name).unwrap(), vec![0u8; BYTES as usize / 2]);
    }
    let publish = async {
        client.list().await.unwrap(); // Answered after the session has the buffers.
        host.publish(&mut publisher, specs(), 1).await
    };
    let (filled, _) = tokio::join!(subscription.next_into(buffers), publish);
    let filled = filled.unwrap();
    let was_copied = filled.was_copied();
    let sharing = if was_copied { Sharing::Mapped } else { Sharing::Copied };
    assert_eq!(
        filled.version().receipt().sharing,
        sharing,
        "the buffers are filled by a copy, sooner or later"
    );

    let cut = TensorBox {
        tensors: Glob::new("a").unwrap(),
        slices: vec![Slice { dimension: 0, indices: Indices::Part { part: 1, parts: 2 } }],
    };
    let request = Request::latest(topic("t")).boxes([cut]);
    let boxed = client.subscribe_to(request).await.unwrap().next().await.unwrap();
    assert_eq!(boxed.receipt().sharing, Sharing::Copied);
    let whole = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
    let (part, all) = (boxed.tensor("a").unwrap(), whole.tensor("a").unwrap());
    assert_eq!(part[..], all[all.len() / 2..]);
    tensors::check(&whole);
    for (name, buffer) in filled.into_buffers() {
        assert!(buffer[..] == whole.tensor(name.as_str()).unwrap()[..]);
    }
}

/// Goal: the memory of announcements that nobody waits for any more is released, though the connection lives.
/// Method: drop a subscription as a version is published, again and again: some announcements cross it.
#[tokio::test]
async fn unwanted_announcements_keep_no_memory() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    let client = host.taker().await;
    for version in 1..=20 {
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        if version > 1 {
            assert_eq!(subscription.next().await.unwrap().id().version, Version(version - 1));
        }
        host.publish(&mut publisher, specs(), version).await;
        drop(subscription);
    }
    client.list().await.unwrap();
    host.wait_until_released().await;
}

/// A process between taker and server: one connection after the other, each until `cut` is notified. Passes descriptors
/// or, like some sandboxes, bytes alone.
async fn forward(socket: PathBuf, to: PathBuf, passes: bool, cut: Arc<Notify>) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    loop {
        let (taker, _) = listener.accept().await?;
        let server = UnixStream::connect(&to).await?;
        tokio::select! {
            _ = pump(&taker, &server, passes) => {}
            _ = pump(&server, &taker, passes) => {}
            () = cut.notified() => {}
        }
    }
}

async fn pump(from: &UnixStream, to: &UnixStream, passes: bool) -> io::Result<()> {
    let mut part = vec![0; 8192];
    loop {
        let received = from.async_io(Interest::READABLE, || unix::receive(from, &mut part));
        let (bytes, descriptors) = received.await?;
        let mut descriptors = descriptors.ok().filter(|_| passes).unwrap_or_default();
        let mut rest = &part[..bytes];
        while !rest.is_empty() {
            let sending = to.async_io(Interest::WRITABLE, || {
                let passed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                unix::send(to, rest, &passed)
            });
            rest = &rest[sending.await?..];
            descriptors.clear();
        }
        if bytes == 0 {
            return Ok(());
        }
    }
}

/// A taker behind a process that [forwards](forward), and what cuts its connection.
async fn taker_behind(host: &Host, passes: bool) -> (Client, Arc<Notify>, JoinSet<io::Result<()>>) {
    let (socket, cut) = (host.folder.path().join("between.sock"), Arc::new(Notify::new()));
    let mut between = JoinSet::new();
    between.spawn(forward(socket.clone(), host.socket(), passes, Arc::clone(&cut)));
    eventually(|| socket.exists()).await;
    (taker_of(&socket).await, cut, between)
}

/// Goal: without descriptors a version is declined, and comes in chunks; over a new connection it is not sent again.
/// Method: a process between both that passes bytes alone; cut its connection.
#[tokio::test]
async fn without_descriptors_versions_arrive_in_chunks() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    let (client, cut, _between) = taker_behind(&host, false).await;
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    for version in 1..=2 {
        host.publish(&mut publisher, specs(), version).await;
        let snapshot = subscription.next().await.unwrap();
        assert_eq!(snapshot.receipt().sharing, Sharing::Chunks(NotLent::Declined));
        assert_eq!((snapshot.id().version, snapshot.receipt().wire_bytes), (Version(version), BYTES));
        tensors::check(&snapshot);
    }
    host.wait_until_released().await;
    cut.notify_one();
    eventually(|| client.reconnects() == 1).await;
    host.publish(&mut publisher, specs(), 3).await;
    assert_eq!(subscription.next().await.unwrap().id().version, Version(3));
}

/// Goal: a version that was lent before all of it was hashed is known again over the next connection, and its load is
/// counted: a number stands for its digest.
/// Method: follow a topic through a process between both; cut its connection, and publish once more.
#[tokio::test]
async fn a_lent_version_is_not_sent_again() {
    let host = Host::new(config());
    let mut publisher = host.publisher();
    let (client, cut, _between) = taker_behind(&host, true).await;
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    client.list().await.unwrap();
    let mut publication = host.publish(&mut publisher, specs(), 1).await;
    let first = subscription.next().await.unwrap();
    assert_eq!(first.receipt().sharing, Sharing::Mapped);
    first.loaded();
    assert!(publication.loaded(1, Duration::from_secs(10)).await);
    cut.notify_one();
    eventually(|| client.reconnects() == 1).await;
    client.list().await.unwrap();
    host.publish(&mut publisher, specs(), 2).await;
    let second = subscription.next().await.unwrap();
    assert_eq!((second.id().version, second.skipped(), second.is_new_epoch()), (Version(2), 0, false));
    assert_eq!(second.receipt().sharing, Sharing::Mapped);
    tensors::check(&first);
    tensors::check(&second);
}
