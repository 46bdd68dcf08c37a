//! [`MovingRuntime`] and [`TaskMover`]: move connections from the thread that accepted them to another one.
//!
//! A server learns the session of a connection from its first message, after quinn has spawned the connection's task.
//! Distributing connections earlier could put the lanes of one session on one thread, and would cost a session with a
//! single lane a thread switch for each chunk. So every connection starts on the accepting thread, and only a lane that
//! joins a session is moved.

use quinn::{AsyncTimer, AsyncUdpSocket, Runtime};
use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Instant,
};
use tensor_relay_device::Lock;
use tokio::{
    runtime::{self, Handle},
    time::Sleep,
};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A quinn runtime whose tasks can be moved; wraps another one.
#[derive(Debug)]
pub(crate) struct MovingRuntime {
    inner: Arc<dyn Runtime>,
    /// Locked while a connection is accepted, so that the task spawned meanwhile is the connection's.
    accepting: Lock<()>,
    /// The mover of the last spawned task, until it is taken.
    spawned: Lock<Option<TaskMover>>,
}

impl MovingRuntime {
    pub(crate) fn over(inner: Arc<dyn Runtime>) -> Self {
        Self { inner, accepting: Lock::default(), spawned: Lock::default() }
    }

    /// Runs `accept`, which accepts one connection; returns the mover of the task that it spawned.
    pub(crate) fn accepting<T>(&self, accept: impl FnOnce() -> T) -> (T, Option<TaskMover>) {
        let _one_at_a_time = self.accepting.lock();
        self.spawned.lock().take(); // The endpoint's task, which is not moved.
        let accepted = accept();
        (accepted, self.spawned.lock().take())
    }
}

impl Runtime for MovingRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        Box::pin(MovingTimer { sleep: sleep(at), at, runtime: Handle::current().id() })
    }

    fn spawn(&self, task: Task) {
        let mover = TaskMover::default();
        *self.spawned.lock() = Some(mover.clone());
        self.inner.spawn(Box::pin(MovingTask { task: Some(task), mover }));
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        self.inner.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        self.inner.now()
    }
}

/// Moves one task to another runtime. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct TaskMover(Arc<Lock<MoveRequest>>);

#[derive(Default)]
struct MoveRequest {
    target: Option<Handle>,
    waker: Option<Waker>,
}

impl TaskMover {
    /// Spawns `task` on the current runtime; returns its mover.
    pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        let mover = Self::default();
        tokio::spawn(MovingTask { task: Some(Box::pin(task)), mover: mover.clone() });
        mover
    }

    /// Moves the task to the runtime `target`. A task moves once: after that, calls have no effect.
    pub(crate) fn move_to(&self, target: Handle) {
        let waker = {
            let mut request = self.0.lock();
            request.target = Some(target);
            request.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes the requested runtime. If there is no request, registers `waker` for it.
    fn poll(&self, waker: &Waker) -> Option<Handle> {
        let mut request = self.0.lock();
        if request.target.is_none()
            && !request.waker.as_ref().is_some_and(|registered| registered.will_wake(waker))
        {
            request.waker = Some(waker.clone());
        }
        request.target.take()
    }
}

impl fmt::Debug for TaskMover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TaskMover")
    }
}

/// A task that can be moved: it is respawned on another runtime. Costs an uncontended lock for each poll.
///
/// No wake-up is lost: a respawned task is polled at least once. This polls the futures that it waits for, which then
/// wake the task on the new runtime.
struct MovingTask {
    task: Option<Task>,
    mover: TaskMover,
}

impl Future for MovingTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(target) = self.mover.poll(cx.waker()) {
            self.task.take().map(|task| target.spawn(task));
            return Poll::Ready(());
        }
        match &mut self.task {
            Some(task) => task.as_mut().poll(cx),
            None => Poll::Ready(()),
        }
    }
}

/// A timer that moves with its task. If it stayed, it would wake the previous thread for every packet.
struct MovingTimer {
    sleep: Pin<Box<Sleep>>,
    at: Instant,
    runtime: runtime::Id,
}

impl AsyncTimer for MovingTimer {
    fn reset(mut self: Pin<&mut Self>, at: Instant) {
        self.at = at;
        self.sleep.as_mut().reset(at.into());
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let here = Handle::current().id();
        if here != self.runtime {
            (self.runtime, self.sleep) = (here, sleep(self.at));
        }
        Future::poll(self.sleep.as_mut(), cx)
    }
}

impl fmt::Debug for MovingTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MovingTimer").field("at", &self.at).finish_non_exhaustive()
    }
}

fn sleep(at: Instant) -> Pin<Box<Sleep>> {
    Box::pin(tokio::time::sleep_until(at.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::lane_threads::LaneThread;
    use std::{thread, time::Duration};
    use tokio::sync::mpsc;

    /// A moved task continues on the other thread with its timer, and loses no message.
    #[tokio::test]
    async fn a_task_moves_with_its_timer() {
        let runtime = Arc::new(MovingRuntime::over(Arc::new(quinn::TokioRuntime)));
        let thread = LaneThread::start("there").unwrap();
        let (ask, mut asked) = mpsc::unbounded_channel::<u32>();
        let (answer, mut answers) = mpsc::unbounded_channel();
        let timers = Arc::clone(&runtime);
        let task = async move {
            let mut timer = timers.new_timer(Instant::now());
            while let Some(question) = asked.recv().await {
                timer.as_mut().reset(Instant::now() + Duration::from_millis(1));
                std::future::poll_fn(|cx| timer.as_mut().poll(cx)).await;
                let name = thread::current().name().map(str::to_owned);
                answer.send((question, name)).unwrap();
            }
        };
        let ((), mover) = runtime.accepting(|| runtime.spawn(Box::pin(task)));
        let mover = mover.unwrap();
        ask.send(1).unwrap();
        let (first, here) = answers.recv().await.unwrap();
        mover.move_to(thread.handle().clone());
        ask.send(2).unwrap();
        ask.send(3).unwrap();
        let (second, there) = answers.recv().await.unwrap();
        let (third, still_there) = answers.recv().await.unwrap();
        assert_eq!((first, second, third), (1, 2, 3));
        assert_ne!(here.as_deref(), Some("there"));
        assert_eq!((there.as_deref(), still_there.as_deref()), (Some("there"), Some("there")));
    }

    #[tokio::test]
    async fn only_an_accept_returns_a_mover() {
        let runtime = MovingRuntime::over(Arc::new(quinn::TokioRuntime));
        runtime.spawn(Box::pin(std::future::pending()));
        assert!(runtime.accepting(|| ()).1.is_none());
    }
}
