use super::super::socket::Socket;
use super::*;
use std::time::Duration;
use tokio::{task::yield_now, time::timeout};

/// A socket that records its calls. It accepts `room` calls, then blocks.
#[derive(Debug)]
struct Recorder {
    state: Mutex<State>,
    room_given: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    room: usize,
    calls: Vec<(u16, usize)>,
}

impl Recorder {
    fn with_room(room: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { room, calls: vec![] }), room_given: Arc::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_room(&self, calls: usize) {
        self.state().room += calls;
        self.room_given.notify_one();
    }

    /// The peer's port and the number of segments of each call so far.
    fn calls(&self) -> Vec<(u16, usize)> {
        self.state().calls.clone()
    }
}

impl AsyncUdpSocket for Recorder {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(RoomPoller(self))
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut state = self.state();
        if state.room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        state.room -= 1;
        let segments = transmit.contents.len() / transmit.segment_size.unwrap_or(transmit.contents.len());
        state.calls.push((transmit.destination.port(), segments));
        Ok(())
    }

    fn poll_recv(
        &self,
        _: &mut Context<'_>,
        _: &mut [IoSliceMut<'_>],
        _: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(([127, 0, 0, 1], 1).into())
    }

    fn max_transmit_segments(&self) -> usize {
        64
    }
}

#[derive(Debug)]
struct RoomPoller(Arc<Recorder>);

impl UdpPoller for RoomPoller {
    fn poll_writable(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.0.state().room > 0 {
            return Poll::Ready(Ok(()));
        }
        let (waker, room) = (cx.waker().clone(), Arc::clone(&self.0.room_given));
        tokio::spawn(async move {
            room.notified().await;
            waker.wake();
        });
        Poll::Pending
    }
}

/// Sends a burst like quinn's: ten datagrams of Ethernet size.
fn send_burst(socket: &Batching, port: u16) -> io::Result<()> {
    socket.try_send(&Transmit {
        destination: ([127, 0, 0, 1], port).into(),
        ecn: None,
        contents: &[0; 14_720],
        segment_size: Some(1_472),
        src_ip: None,
    })
}

/// Yields to all ready tasks a few times.
async fn run_other_tasks() {
    for _ in 0..8 {
        yield_now().await;
    }
}

#[tokio::test]
async fn held_datagrams_are_sent_when_nothing_follows() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    for _ in 0..2 {
        send_burst(&socket, 7).expect("there is room");
    }
    assert_eq!(recorder.calls(), [(7, 10)], "the second is held");
    run_other_tasks().await;
    assert_eq!(recorder.calls(), [(7, 10), (7, 10)]);
}

/// The flush task does not split batches while a burst follows at each poll. The batches double up to the 44 datagrams
/// that one call may have; the last 36 of the 150 are still held.
#[tokio::test]
async fn following_bursts_join_the_batch() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    for _ in 0..15 {
        send_burst(&socket, 7).expect("there is room");
        yield_now().await;
    }
    assert_eq!(recorder.calls(), [(7, 10), (7, 20), (7, 40), (7, 44)]);
}

#[tokio::test]
async fn peers_have_separate_batches() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    for _ in 0..3 {
        send_burst(&socket, 7).expect("there is room");
        send_burst(&socket, 8).expect("there is room");
    }
    assert_eq!(recorder.calls(), [(7, 10), (8, 10), (7, 20), (8, 20)]);
}

/// While the socket blocks, the flush waits for it.
#[tokio::test]
async fn a_blocked_flush_resumes_when_there_is_room() {
    let recorder = Recorder::with_room(1);
    let socket = Batching::over(recorder.clone());
    for _ in 0..2 {
        send_burst(&socket, 7).expect("held");
    }
    run_other_tasks().await;
    assert_eq!(recorder.calls(), [(7, 10)]);
    recorder.give_room(1);
    run_other_tasks().await;
    assert_eq!(recorder.calls(), [(7, 10), (7, 10)]);
}

/// Datagrams refused by a full socket are not held: quinn sends them again.
#[tokio::test]
async fn refused_datagrams_are_not_held() {
    let recorder = Recorder::with_room(0);
    let socket = Batching::over(recorder.clone());
    let refused = send_burst(&socket, 7).expect_err("there is no room");
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    recorder.give_room(10);
    run_other_tasks().await;
    assert_eq!(recorder.calls(), []);
}

#[tokio::test]
async fn dropping_the_socket_sends_held_datagrams() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    for _ in 0..2 {
        send_burst(&socket, 7).expect("there is room");
    }
    drop(socket);
    assert_eq!(recorder.calls(), [(7, 10), (7, 10)]);
    run_other_tasks().await;
    assert_eq!(Arc::strong_count(&recorder), 1, "the task ended and dropped the socket");
}

/// When a connection moves to another thread, so does its flush task.
#[test]
fn the_flush_task_moves_with_the_connection() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    let runtime = || runtime::Builder::new_current_thread().build().expect("it needs no resources");
    let (here, there) = (runtime(), runtime());
    let two_bursts = async || {
        for _ in 0..2 {
            send_burst(&socket, 7).expect("there is room");
        }
    };
    here.block_on(two_bursts());
    there.block_on(async {
        two_bursts().await;
        run_other_tasks().await;
    });
    let sent: usize = recorder.calls().iter().map(|(_, segments)| segments).sum();
    assert_eq!(sent, 40, "all were sent, although the first runtime never ran again");
}

/// A new peer replaces an idle one.
#[tokio::test]
async fn peer_queues_are_bounded() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    let ports = 1..=PEERS_MAX as u16 + 100;
    for port in ports.clone() {
        send_burst(&socket, port).expect("there is room");
    }
    let peers = || socket.peers.read().unwrap_or_else(PoisonError::into_inner).len();
    assert_eq!(peers(), PEERS_MAX);
    assert_eq!(recorder.calls().len(), ports.len());
}

#[test]
fn without_a_runtime_no_datagram_is_held() {
    let recorder = Recorder::with_room(usize::MAX);
    let socket = Batching::over(recorder.clone());
    for _ in 0..2 {
        send_burst(&socket, 7).expect("there is room");
    }
    assert_eq!(recorder.calls(), [(7, 10), (7, 10)]);
}

/// Ten jumbo segments from quinn are more than the kernel accepts at once.
#[tokio::test]
async fn a_jumbo_burst_arrives_complete() {
    let bind = || {
        let address = ([127, 0, 0, 1], 0).into();
        Arc::new(Socket::bind(address, 4 << 20, 65_000).expect("loopback has ports left"))
    };
    let (sender, receiver) = (bind(), bind());
    let contents: Vec<u8> = (0..10 * 8_972).map(|i| (i / 8_972) as u8).collect();
    let transmit = Transmit {
        destination: receiver.local_addr().expect("it is bound"),
        ecn: None,
        contents: &contents,
        segment_size: Some(8_972),
        src_ip: None,
    };
    let mut poller = Arc::clone(&sender).create_io_poller();
    let writable = poll_fn(|cx| poller.as_mut().poll_writable(cx));
    timeout(DEADLINE, writable)
        .await
        .expect("a new socket has room")
        .expect("it is open");
    let socket = Batching::over(sender);
    assert_eq!(socket.max_transmit_segments(), QUINN_SEGMENTS);
    socket.try_send(&transmit).expect("the kernel takes each part");
    assert_eq!(socket.max_transmit_segments(), 7, "from now on a burst is one call");
    let mut received_bytes = Vec::new();
    while received_bytes.len() < contents.len() {
        let mut buf = vec![0; 1 << 17];
        let mut meta = [RecvMeta::default()];
        let receive = poll_fn(|cx| receiver.poll_recv(cx, &mut [IoSliceMut::new(&mut buf)], &mut meta));
        let received = timeout(DEADLINE, receive).await.expect("all of it arrives");
        assert_eq!(received.expect("nothing fails"), 1);
        received_bytes.extend_from_slice(&buf[..meta[0].len]);
    }
    assert_eq!(received_bytes, contents);
}

const DEADLINE: Duration = Duration::from_secs(5);
