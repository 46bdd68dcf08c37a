//! [`Alarm`]: one timer for all deadlines of a session.

use std::pin::Pin;
use tokio::time::{Instant, Sleep, sleep_until};

/// A timer that is set seldom. Each version has a deadline of its own, a second later: setting a timer for each would
/// cost a system call whenever it is earlier than all other timers of the runtime. So a timer that is set stays as it is
/// while deadlines move to later times, and rings too early instead.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    /// The timer, while it is set.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    /// Waits until `deadline`, or until an earlier one of a previous call; without any, for ever. Cancel safe: the timer
    /// stays set.
    pub(super) async fn ring(&mut self, deadline: Option<Instant>) {
        if let Some(at) = deadline
            && self.sleep.as_ref().is_none_or(|sleep| at < sleep.deadline())
        {
            self.sleep = Some(Box::pin(sleep_until(at)));
        }
        match &mut self.sleep {
            Some(sleep) => sleep.await,
            None => std::future::pending().await,
        }
        self.sleep = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    /// Whether the alarm rings within a second.
    async fn rings(alarm: &mut Alarm, deadline: Option<Instant>) -> bool {
        timeout(Duration::from_secs(1), alarm.ring(deadline)).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn an_alarm_rings_no_later_than_each_deadline_and_only_once() {
        let (mut alarm, began) = (Alarm::default(), Instant::now());
        let at = |seconds| Some(began + Duration::from_secs(seconds));
        assert!(!rings(&mut alarm, at(5)).await);
        assert!(!rings(&mut alarm, at(9)).await, "it stays set to 5 s");
        assert!(!rings(&mut alarm, None).await);
        alarm.ring(at(4)).await;
        assert_eq!(began.elapsed(), Duration::from_secs(4), "an earlier deadline sets it anew");
        alarm.ring(at(9)).await;
        assert_eq!(began.elapsed(), Duration::from_secs(9), "that of 5 s is gone");
        assert!(!rings(&mut alarm, None).await);
    }
}
