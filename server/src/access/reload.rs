//! Reloads the rules of a running server from their files.

use super::{AccessStoreError, Rules, texts::Texts};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::TicketId;
use tokio::sync::watch;

/// The interval at which a running server checks the files.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The duration after which a check is reported as late. The next check starts only after the late one ends, so that a
/// hung file system blocks a single thread.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// When each ticket was last used, in seconds since 1970.
pub(super) type Uses = Lock<HashMap<TicketId, u64>>;

/// The result of reading the files once.
pub(super) struct Reading {
    /// The texts of the files that are valid, and otherwise their texts before.
    pub(super) texts: Texts,
    /// The rules of these texts.
    pub(super) rules: Result<Rules, AccessStoreError>,
    /// Why files are refused.
    pub(super) refused: Vec<AccessStoreError>,
    /// The result of saving the uses of tickets.
    pub(super) saved: Result<(), AccessStoreError>,
}

/// Checks the files until all receivers of the rules are dropped, and saves the times at which tickets were used. While
/// some are invalid or cannot be read, `problem` has the reasons.
pub(super) async fn follow_files(
    read: impl Fn(Texts, Option<&HashMap<TicketId, u64>>) -> Reading + Clone + Send + 'static,
    mut texts: Texts,
    sender: watch::Sender<Arc<Rules>>,
    uses: Weak<Uses>,
    problem: Arc<Lock<Option<String>>>,
) {
    let (mut last_save_error, mut written) = (LastError::default(), HashMap::new());
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
        let used = uses.upgrade().map(|uses| uses.lock().clone());
        let used = used.filter(|used| *used != written);
        let (read, before, new_uses) = (read.clone(), texts.clone(), used.clone());
        let mut reading = tokio::task::spawn_blocking(move || read(before, new_uses.as_ref()));
        let outcome = match tokio::time::timeout(CHECK_TIMEOUT, &mut reading).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let late = format!(
                    "they were not read within {} s: does the file system hang?",
                    CHECK_TIMEOUT.as_secs()
                );
                report(&problem, Some(late));
                tokio::select! {
                    () = sender.closed() => return,
                    outcome = reading => outcome,
                }
            }
        };
        let Reading { texts: read_texts, rules, refused, saved } = match outcome {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => {
                report(
                    &problem,
                    Some("reading them failed because of a bug in this program: please report it".into()),
                );
                continue;
            }
            Err(_) => return, // The runtime shuts down.
        };
        texts = read_texts;
        let unread = rules.map(|rules| replace(&sender, rules)).err();
        let reasons: Vec<_> = refused.iter().chain(&unread).map(ToString::to_string).collect();
        report(&problem, (!reasons.is_empty()).then(|| reasons.join("; ")));
        match saved {
            Err(error) => {
                last_save_error.report(&error, "The times at which tickets were used cannot be saved.")
            }
            Ok(()) => written = used.unwrap_or(written),
        }
    }
}

/// Stores the current problem with the files, and logs it when it changes.
fn report(problem: &Lock<Option<String>>, now: Option<String>) {
    let mut before = problem.lock();
    match &now {
        Some(error) if now != *before => {
            tracing::warn!(
                %error,
                "Access files cannot be used: of these, the previous rules stay in force; other files are followed."
            );
        }
        None if before.is_some() => tracing::info!("All access files can be used again."),
        _ => {}
    }
    *before = now;
}

/// Replaces the current rules. While the server runs, revoked tickets stay revoked, and users stay restricted if the
/// list restricted them; a revoked key, or one that its file lost, stays revoked until it is trusted again. So a
/// truncated file readmits nobody.
fn replace(sender: &watch::Sender<Arc<Rules>>, mut rules: Rules) {
    sender.send_if_modified(|current| {
        rules.keep_revoked(current);
        let is_new = **current != rules;
        if is_new {
            tracing::info!("The access rules were replaced.");
            *current = Arc::new(rules);
        }
        is_new
    });
}

/// The last logged error, so that a lasting error is logged once.
#[derive(Debug, Default)]
struct LastError(String);

impl LastError {
    fn report(&mut self, error: &AccessStoreError, what: &str) {
        let error = error.to_string();
        if error != self.0 {
            tracing::warn!(%error, "{what}");
            self.0 = error;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: however a check fails, the previous rules stay, the problem is reported, and the next check runs. Method:
    /// checks that panic, hang, and succeed again.
    #[tokio::test]
    async fn a_failed_check_keeps_the_rules() {
        let (gate, opened) = std::sync::mpsc::channel::<bool>();
        let opened = Arc::new(Lock::new(opened));
        let look = move |texts: Texts, _: Option<&HashMap<TicketId, u64>>| {
            let is_good = opened.lock().recv().unwrap();
            assert!(is_good, "this look fails");
            let rules = Rules { open: true, ..Rules::default() };
            Reading { texts, rules: Ok(rules), refused: vec![], saved: Ok(()) }
        };
        let sender = watch::Sender::new(Arc::new(Rules::default()));
        let (mut rules, problem) = (sender.subscribe(), Arc::<Lock<Option<String>>>::default());
        let reported = || problem.lock().clone();
        let becomes = async |what: &str| {
            let deadline = tokio::time::Instant::now() + 2 * CHECK_TIMEOUT;
            while !reported().is_some_and(|problem| problem.contains(what)) {
                assert!(tokio::time::Instant::now() < deadline, "{:?}", reported());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::spawn(follow_files(look, Texts::default(), sender, Weak::new(), Arc::clone(&problem)));
        gate.send(false).unwrap();
        becomes("a bug in this program").await;
        becomes("not read within").await;
        assert!(!rules.borrow().open);
        gate.send(true).unwrap();
        rules.changed().await.unwrap();
        assert!(rules.borrow().open && reported().is_none());
    }
}
