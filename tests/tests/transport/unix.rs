//! Lanes over a Unix socket: descriptors, hostile peers, and errors of connecting.

use crate::{
    cases::{controls, noise, receive, send, topics},
    fixture::{Backend, Fixture, run_on},
    hostile::{INVALID_CLIENT_SEGMENTS, INVALID_SERVER_SEGMENTS, assert_pong, assert_refused},
};
use rustix::{
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use std::{
    fs::{self, File},
    io::{ErrorKind, IoSlice, PipeReader, Read, pipe},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::PathBuf,
    process::Command,
    time::Duration,
};
use tempfile::TempDir;
use tensor_relay_protocol::{ClientMessage, CloseCode, CodecSet, FeatureSet, Hello, ServerMessage};
use tensor_relay_server::{Access, Config, Server};
use tensor_relay_transport::{
    ConnectError, Identity, Lane, LaneError, LaneKind, LaneKindReason, Listener, Peer, control,
    unix::{DESCRIPTORS_MAX, LostDescriptors, SocketListener, send as send_raw},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::{UnixListener, UnixStream},
    time::timeout,
};

/// The number of batches that may wait to be sent.
const OUTGOING_MAX: usize = 64;

/// The number of received batches that are kept.
const INCOMING_MAX: usize = 64;

/// A deadline that only a broken lane reaches.
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn both_ends_know_each_other() {
    run_on(&[Backend::Unix], async |fixture| {
        let (server, client) = fixture.lane().await;
        for lane in [&server, &client] {
            let process = lane.peer().process().unwrap();
            let found = (process.uid, process.gid, process.pid);
            let own = fs::metadata("/proc/self").unwrap();
            assert_eq!(found, (own.uid(), own.gid(), Some(std::process::id())));
            assert_eq!((lane.kind(), lane.local_user()), (LaneKind::Unix, Some(own.uid())));
        }
        assert_eq!(client.reason(), LaneKindReason::Local);
        assert_eq!(fixture.listener.socket_path(), Some(&*path(fixture)));
    });
    run_on(&[Backend::Tcp], async |fixture| {
        let (server, client) = fixture.lane().await;
        for lane in [server, client] {
            assert!(lane.descriptors().is_none() && lane.local_user().is_none());
            assert!(matches!(lane.peer(), Peer::Network(_)));
        }
    });
}

/// Goal: descriptors are there when the message is that was queued after them. Method: rounds of as many batches as may
/// wait, each before a message, while chunks fill the socket. Each batch has the open files of its number.
#[test]
fn descriptors_arrive_with_their_messages_under_load() {
    run_on(&[Backend::Unix], async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(64 << 20);
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let loading = async {
            for chunk in 0..16 {
                send(&server, chunk, &noise(2 << 20, chunk)).await.unwrap();
            }
        };
        let unloading = async {
            for chunk in 0..16 {
                let received = receive(client.accept_data().await.unwrap()).await.unwrap();
                assert!(received == noise(2 << 20, chunk));
            }
        };
        let passing = async {
            for round in 0..20 {
                let mut expected = vec![];
                for number in 0..OUTGOING_MAX {
                    let batch: Vec<File> = (0..=number % DESCRIPTORS_MAX)
                        .map(|index| new_file(fixture, &format!("{round} {number} {index}")))
                        .collect();
                    expected.push((inode(&batch[0]), batch.len()));
                    let batch = batch.into_iter().map(OwnedFd::from).collect();
                    server.descriptors().unwrap().send(batch).unwrap();
                    to_client.send(topics()).await.unwrap();
                }
                for (number, (inode, len)) in expected.into_iter().enumerate() {
                    assert_eq!(from_server.next().await.unwrap(), topics());
                    let batch = client.descriptors().unwrap().take(inode).unwrap();
                    assert_eq!(batch.len(), len);
                    for (index, file) in batch.into_iter().enumerate() {
                        let content = content(File::from(file));
                        assert_eq!(content, format!("{round} {number} {index}"));
                    }
                }
            }
        };
        timeout(DEADLINE, async { tokio::join!(loading, unloading, passing) })
            .await
            .unwrap();
        let unknown = client.descriptors().unwrap().take(1);
        assert_eq!(unknown.unwrap_err(), LostDescriptors::NotSent);
    });
}

/// Goal: batches that nobody takes are closed: the oldest when there are too many, all with the lane. Method: the write
/// ends of pipes, whose read ends tell.
#[test]
fn batches_that_nobody_takes_are_closed() {
    run_on(&[Backend::Unix], async |fixture| {
        let (server, client) = fixture.lane().await;
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let mut pipes = vec![];
        for _ in 0..INCOMING_MAX + 10 {
            let (read, write) = pipe().unwrap();
            server.descriptors().unwrap().send(vec![write.into()]).unwrap();
            to_client.send(topics()).await.unwrap();
            assert_eq!(from_server.next().await.unwrap(), topics());
            pipes.push(read);
        }
        let open: Vec<bool> = pipes.iter().map(is_open).collect();
        assert_eq!(open, [[false; 10].as_slice(), &[true; INCOMING_MAX]].concat());
        drop((to_client, from_server, _from_client, _to_server, server));
        client.closed().await;
        drop(client);
        for pipe in &pipes {
            timeout(DEADLINE, async {
                while is_open(pipe) {
                    tokio::task::yield_now().await; // The lane's task ends.
                }
            })
            .await
            .unwrap();
        }
    });
}

/// Goal: what a server cannot send it does not keep. Method: a peer that does not read, batches of wrong lengths, and a lane
/// that has ended.
#[test]
fn batches_that_cannot_be_sent_are_refused() {
    run_on(&[Backend::Unix], async |fixture| {
        let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
        let (server, peer) = tokio::join!(accepting, UnixStream::connect(path(fixture)));
        let _filling = send_forever(&server);
        let descriptors = server.descriptors().unwrap().clone();
        let mut pipes = vec![];
        let refused = timeout(DEADLINE, async {
            loop {
                let (read, write) = pipe().unwrap();
                pipes.push(read);
                match descriptors.send(vec![write.into()]) {
                    Ok(()) => tokio::task::yield_now().await,
                    Err(refused) => return refused,
                }
            }
        });
        let refused = refused.await.unwrap().to_string();
        assert!(refused.contains("64 batches wait") && descriptors.why_not().is_none(), "{refused}");
        assert!(!is_open(pipes.last().unwrap()), "it was closed");
        for wrong in [vec![], (0..=DESCRIPTORS_MAX).map(|_| pipe().unwrap().0.into()).collect()] {
            assert!(descriptors.send(wrong).unwrap_err().to_string().contains("1 to 4"));
        }
        drop(peer);
        server.closed().await;
        server.flush_close().await;
        timeout(DEADLINE, async {
            while descriptors.why_not().is_none() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
        assert!(pipes.iter().all(|pipe| !is_open(pipe)), "all that waited are closed");
        assert_eq!(descriptors.send(vec![pipe().unwrap().0.into()]).err(), descriptors.why_not());
    });
}

/// Goal: a hostile peer can neither use up the descriptors of this process nor end the lane with them. Method: thousands
/// of them, to a server, which takes none, and to a client, which keeps a bounded number.
#[test]
fn a_flood_of_descriptors_is_survived() {
    run_on(&[Backend::Unix], async |fixture| {
        let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
        let (server, peer) = tokio::join!(accepting, UnixStream::connect(path(fixture)));
        let pipe = flood(&mut peer.unwrap(), &server).await;
        assert!(!is_open(&pipe), "a server keeps none");

        let (client, mut peer) = client_of_raw_server(fixture).await;
        let pipe = flood(&mut peer, &client).await;
        assert!(is_open(&pipe), "the last batches can be taken");
        let (descriptors, file) = (client.descriptors().unwrap().clone(), new_file(fixture, ""));
        assert_eq!(descriptors.take(inode(&file)).unwrap_err(), LostDescriptors::NotSent);
        send_too_many(&peer, &file);
        assert_pong(&mut peer).await;
        assert_eq!(descriptors.take(inode(&file)).unwrap_err(), LostDescriptors::TooMany);
        assert_eq!(client.ended(), None);
        client.close(CloseCode::Done, "");
        client.closed().await;
        drop((client, descriptors, peer));
        timeout(DEADLINE, async {
            while is_open(&pipe) {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    });
}

#[test]
fn peers_that_violate_the_protocol_are_refused() {
    run_on(&[Backend::Unix], async |fixture| {
        let garbage: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
        let garbage = (garbage, CloseCode::Malformed, "kind 71");
        for (segments, code, text) in INVALID_CLIENT_SEGMENTS.iter().chain([&garbage]) {
            let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
            let (server, peer) = tokio::join!(accepting, UnixStream::connect(path(fixture)));
            let mut peer = peer.unwrap();
            assert_pong(&mut peer).await;
            peer.write_all(segments).await.unwrap();
            assert_refused(&server, &mut peer, *code, text).await;
        }
        for (segments, code, text) in INVALID_SERVER_SEGMENTS.iter().chain([&garbage]) {
            let (client, mut peer) = client_of_raw_server(fixture).await;
            assert_pong(&mut peer).await;
            peer.write_all(segments).await.unwrap();
            assert_refused(&client, &mut peer, *code, text).await;
        }
        let (server, client) = fixture.lane().await;
        assert_eq!((server.ended(), client.ended()), (None, None), "another client can still connect");
    });
}

/// Goal: a peer that ends in the middle of a segment, or says nothing, ends its lane.
#[test]
fn peers_that_end_or_say_nothing_end_their_lanes() {
    run_on(&[Backend::Unix], async |fixture| {
        for is_silent in [false, true] {
            let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
            let (server, peer) = tokio::join!(accepting, UnixStream::connect(path(fixture)));
            let mut peer = peer.unwrap();
            peer.write_all(b"\x01\0\0\0\x07\0\0\0abc").await.unwrap();
            if !is_silent {
                peer.shutdown().await.unwrap(); // Half-closed: it could still read.
            }
            match server.closed().await {
                LaneError::TimedOut { peer } if is_silent => assert_eq!(peer, server.peer()),
                LaneError::ConnectionLost { detail, .. } if !is_silent => {
                    assert!(detail.contains("without a close"), "{detail}")
                }
                other => panic!("{is_silent}: {other}"),
            }
        }
    });
}

/// Goal: a session over a Unix socket has one lane. Method: a server that offers further lanes over TCP.
#[test]
fn a_server_offers_no_further_lanes() {
    let config = || Config { lanes_max: 4, processors: 4, ..Config::default() };
    for (backend, has_offer) in [(Backend::Tcp, true), (Backend::Unix, false)] {
        run_on(&[backend], async |fixture| {
            let tuning = fixture.connector.tuning().clone();
            let identity = Identity::ephemeral().unwrap();
            let folder = TempDir::new().unwrap();
            let path = folder.path().join("s");
            let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), &identity, tuning).unwrap();
            let socket = SocketListener::bind(&path, SocketListener::PRIVATE).unwrap();
            let host = match backend {
                Backend::Unix => format!("unix:{}", path.display()),
                _ => listener.local_address().to_string(),
            };
            let _server = Server::start(listener.and_socket(socket), Access::open(), config());
            let lane = fixture.connector.connect(&[host], &[identity.fingerprint()]).await.unwrap();
            let (sender, mut receiver) = control::open(&lane, DEADLINE).await.unwrap();
            let hello = Hello {
                revision_min: 1,
                revision_max: 1,
                agent: String::new(),
                codecs: CodecSet::all(),
                token: None,
                features: FeatureSet::OF_CLIENT,
            };
            sender.send(ClientMessage::Hello(hello)).await.unwrap();
            let answer: ServerMessage = receiver.next().await.unwrap();
            let ServerMessage::Welcome(welcome) = answer else { panic!("{answer:?}") };
            assert_eq!(welcome.lanes.is_some(), has_offer);
        });
    }
}

/// Goal: descriptors that a process has no room for are lost with this reason, and the lane lives. Method: a process of its
/// own, since the limit is the whole process'.
#[test]
fn a_process_without_free_descriptors_says_so() {
    let name = "unix::a_process_without_free_descriptors";
    let program = std::env::current_exe().unwrap();
    let run = Command::new(program).args(["--exact", name, "--ignored"]).output().unwrap();
    let output = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && output.contains("1 passed"), "{output}");
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn a_process_without_free_descriptors() {
    run_on(&[Backend::Unix], async |fixture| {
        let (server, client) = fixture.lane().await;
        let ((to_client, _from_client), (_to_server, mut from_server)) = controls(&server, &client).await;
        let limits = getrlimit(Resource::Nofile);
        for expected in [Err(LostDescriptors::NoneFree), Ok(2)] {
            let files = ["1", "2"].map(|content| new_file(fixture, content));
            let batch = files.each_ref().map(|file| file.try_clone().unwrap().into());
            if expected.is_err() {
                // All below the batch's first one are in use; it becomes free when the batch has been sent.
                let first = batch.iter().map(OwnedFd::as_raw_fd).min().unwrap() as u64;
                setrlimit(Resource::Nofile, Rlimit { current: Some(first + 1), ..limits }).unwrap();
            }
            server.descriptors().unwrap().send(batch.into()).unwrap();
            to_client.send(topics()).await.unwrap();
            assert_eq!(from_server.next().await.unwrap(), topics());
            let taken = client.descriptors().unwrap().take(inode(&files[0]));
            setrlimit(Resource::Nofile, limits).unwrap();
            assert_eq!(taken.map(|batch| batch.len()), expected);
        }
        assert_eq!(client.ended(), None);
    });
}

#[test]
fn errors_of_connecting_say_what_to_do() {
    run_on(&[Backend::Unix], async |fixture| {
        let stale = path(fixture).with_file_name("stale");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        let file = path(fixture).with_file_name("file");
        fs::write(&file, "").unwrap();
        let long = path(fixture).with_file_name("x".repeat(120));
        let missing = path(fixture).with_file_name("missing");
        for (path, advice) in [
            (missing, "share the folder"),
            (stale, "start it again"),
            (file, "start it again"),
            (long, "at most 107 bytes"),
        ] {
            let connected = fixture.connector.connect(&[format!("unix:{}", path.display())], &[]).await;
            let error = connected.unwrap_err();
            assert!(matches!(error, ConnectError::UnixSocket { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&path.display().to_string()) && text.contains(advice), "{text}");
        }
    });
}

/// Goal: a process that listens in a server's place is sent nothing. Method: a raw server, whose user is not the named one.
#[test]
fn a_listener_of_another_user_is_sent_nothing() {
    run_on(&[Backend::Unix], async |fixture| {
        let socket = path(fixture).with_file_name("squatted");
        let listener = UnixListener::bind(&socket).unwrap();
        let hosts = [format!("unix:{}", socket.display())];
        let own = fs::metadata("/proc/self").unwrap().uid();
        let connector = fixture.connector.clone().with_server_uid(Some(own + 1));
        let (connected, accepted) = tokio::join!(connector.connect(&hosts, &[]), listener.accept());
        let error = connected.unwrap_err();
        assert!(
            matches!(&error, ConnectError::UnexpectedUser { found_uid, .. } if *found_uid == own),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(text.contains(&format!("?server_uid={own}")) && text.contains("squatted"), "{text}");
        let mut sent = vec![];
        timeout(DEADLINE, accepted.unwrap().0.read_to_end(&mut sent))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(sent, b"");
        let connector = fixture.connector.clone().with_server_uid(Some(own));
        let (connected, _accepted) = tokio::join!(connector.connect(&hosts, &[]), listener.accept());
        assert_eq!(connected.unwrap().ended(), None);
    });
}

/// Goal: a full queue of connections to accept is waited for. Method: a queue for one connection, from which the server
/// takes one when the client has found it full.
#[test]
fn a_full_accept_queue_is_waited_for() {
    run_on(&[Backend::Unix], async |fixture| {
        let socket = path(fixture).with_file_name("full");
        let listener = UnixListener::bind(&socket).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut waiting = vec![];
        while let Ok(stream) = UnixStream::connect(&socket).await {
            waiting.push(stream);
        }
        let hosts = [format!("unix:{}", socket.display())];
        let mut connecting = std::pin::pin!(fixture.connector.connect(&hosts, &[]));
        assert!(timeout(Duration::from_millis(100), &mut connecting).await.is_err(), "the queue is full");
        let accepting = async { listener.accept().await.unwrap() };
        let (_first, lane) = tokio::join!(accepting, connecting);
        assert_eq!(lane.unwrap().ended(), None);
    });
}

/// Goal: a server of one host has no port, and a socket with the mode that it asked for.
#[test]
fn a_listener_of_one_host_has_no_network() {
    run_on(&[Backend::Unix], async |fixture| {
        let path = path(fixture).with_file_name("only");
        let socket = SocketListener::bind(&path, 0o660).unwrap();
        let tuning = fixture.connector.tuning().clone();
        let listener = Listener::on_socket(socket, tuning);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert_eq!((listener.local_address().port(), listener.socket_path()), (0, Some(&*path)));
        let hosts = [format!("unix:{}", path.display())];
        let accepting = async { listener.accept().await.unwrap().accept().await.unwrap() };
        let (server, client) = tokio::join!(accepting, fixture.connector.connect(&hosts, &[]));
        listener.close(CloseCode::ShuttingDown);
        assert!(matches!(client.unwrap().closed().await, LaneError::ClosedByPeer { .. }));
        drop(server);
        listener.wait_idle().await;
        drop(listener);
        assert!(!path.exists());
    });
}

/// The fixture's socket.
fn path(fixture: &Fixture) -> PathBuf {
    fixture.folder.as_ref().unwrap().path().join("s")
}

/// A new file with this `content`.
fn new_file(fixture: &Fixture, content: &str) -> File {
    let path = path(fixture).with_file_name("file");
    fs::write(&path, content).unwrap();
    let file = File::open(&path).unwrap();
    fs::remove_file(path).unwrap(); // The next file has another inode.
    file
}

fn inode(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

fn content(mut file: File) -> String {
    let mut content = String::new();
    file.read_to_string(&mut content).unwrap();
    content
}

/// Whether a write end of the pipe is open.
fn is_open(pipe: &PipeReader) -> bool {
    rustix::fs::fcntl_setfl(pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
    let mut pipe = pipe;
    pipe.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Sends chunks on `lane` until the task is dropped.
fn send_forever(lane: &Lane) -> tokio::task::JoinSet<()> {
    let mut sending = tokio::task::JoinSet::new();
    let lane = lane.clone();
    sending.spawn(async move { while send(&lane, 0, &noise(4 << 20, 1)).await.is_ok() {} });
    sending
}

/// Sends 4,000 write ends of a pipe, two with each byte of pings, and waits until the lane has read all. Returns the read
/// end.
async fn flood(peer: &mut UnixStream, lane: &Lane) -> PipeReader {
    let (read, write) = pipe().unwrap();
    let ping = |number| [6, 0, 0, 0, 8, 0, 0, 0, number, 0, 0, 0, 0, 0, 0, 0];
    let sending = async {
        for byte in [[ping(1); 124].as_flattened(), &ping(2)].concat() {
            let batch = [write.as_fd(); 2];
            peer.async_io(Interest::WRITABLE, || send_raw(&*peer, &[byte], &batch))
                .await
                .unwrap_or_else(|error| panic!("{error}: {:?}", lane.ended()));
        }
    };
    timeout(DEADLINE, sending).await.unwrap();
    drop(write);
    let mut answer = [0; 16];
    while answer[..9] != [7, 0, 0, 0, 8, 0, 0, 0, 2] {
        timeout(DEADLINE, peer.read_exact(&mut answer)).await.unwrap().unwrap();
    }
    assert_eq!(lane.ended(), None);
    read
}

/// Sends a ping with more descriptors than may be sent at once.
fn send_too_many(peer: &UnixStream, file: &File) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd(); DESCRIPTORS_MAX + 1];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let ping = IoSlice::new(b"\x06\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0");
    assert_eq!(sendmsg(peer, &[ping], &mut control, SendFlags::empty()).unwrap(), ping.len());
}

/// Connects a client to a raw server; returns the lane and the server's stream.
async fn client_of_raw_server(fixture: &Fixture) -> (Lane, UnixStream) {
    let path = path(fixture).with_file_name("raw");
    let listener = UnixListener::bind(&path).unwrap();
    let hosts = [format!("unix:{}", path.display())];
    let (lane, peer) = tokio::join!(fixture.connector.connect(&hosts, &[]), listener.accept());
    fs::remove_file(path).unwrap();
    (lane.unwrap(), peer.unwrap().0)
}
