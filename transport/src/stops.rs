//! Stops of this process (SIGSTOP, a frozen container): what arrived meanwhile is read before its timeouts count.
//!
//! After a stop all timers have expired, and tokio may poll the tasks before it looks at the sockets: a signal
//! interrupts its wait for them. A peer would then count as silent although its messages, perhaps its last ones, are in
//! the kernel's buffers.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep, error::Elapsed, sleep};

/// The delay from which this process counts as stopped. Longer than the interval of pings (`Tuning`), which wake a
/// lane's tasks, and than the delays on a busy machine.
const STOP: Duration = Duration::from_secs(5);

/// The wait after a stop: more than 0, so that tokio polls the sockets first.
const TURN: Duration = Duration::from_millis(1);

/// As [`tokio::time::timeout`], but `future` is polled once more, after the sockets, before it is given up.
pub(crate) async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = std::pin::pin!(future);
    // Most futures are ready at once, and a timer costs more than they do.
    if let Poll::Ready(output) = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        return Ok(output);
    }
    match tokio::time::timeout(limit, &mut future).await {
        Err(_) => tokio::time::timeout(TURN, future).await,
        ended => ended,
    }
}

/// A task that is polled after the sockets if this process was stopped. A task that slept for another reason loses a
/// [`TURN`].
pub(crate) struct Patient<T> {
    task: T,
    polled_at: Instant,
    turn: Option<Pin<Box<Sleep>>>,
}

impl<T> Patient<T> {
    pub(crate) fn new(task: T) -> Self {
        Self { task, polled_at: Instant::now(), turn: None }
    }
}

impl<T: Future + Unpin> Future for Patient<T> {
    type Output = T::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T::Output> {
        if self.polled_at.elapsed() > STOP && self.turn.is_none() {
            self.turn = Some(Box::pin(sleep(TURN)));
        }
        if let Some(turn) = &mut self.turn {
            ready!(turn.as_mut().poll(cx));
            self.turn = None;
        }
        self.polled_at = Instant::now();
        Pin::new(&mut self.task).poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{pin::pin, task::Waker};
    use tokio::{sync::oneshot, time::advance};

    const LIMIT: Duration = Duration::from_secs(2);

    fn context() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_ready_after_a_stop_is_in_time() {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = pin!(timeout(LIMIT, receiver));
        assert!(waiting.as_mut().poll(&mut context()).is_pending());
        advance(LIMIT).await;
        assert!(waiting.as_mut().poll(&mut context()).is_pending());
        sender.send(()).unwrap();
        assert!(matches!(waiting.as_mut().poll(&mut context()), Poll::Ready(Ok(Ok(())))));
        assert!(timeout(LIMIT, std::future::pending::<()>()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_waits_for_a_turn_after_a_stop() {
        let mut polls = 0;
        let counting = poll_fn(|_| {
            polls += 1;
            if polls < 3 { Poll::Pending } else { Poll::Ready(()) }
        });
        let mut task = Patient::new(counting);
        let mut poll = || Pin::new(&mut task).poll(&mut context());
        assert!(poll().is_pending());
        advance(STOP / 2).await;
        assert!(poll().is_pending());
        advance(2 * STOP).await;
        assert!(poll().is_pending(), "the third poll of the inner task would be its last");
        advance(2 * TURN).await;
        assert!(poll().is_ready());
    }
}
