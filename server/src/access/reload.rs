//! Reloads the rules of a running server from their files.

use super::{AccessStoreError, Rules, texts::Texts};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};
use tensor_relay_protocol::TicketId;
use tokio::sync::watch;

/// How often a running server looks at the files.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// How long a look may take until it is reported. The next one waits for its end, however late: of a file system that does
/// not answer, one thread waits and not more.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// When each ticket was used last, in seconds since 1970.
pub(super) type Uses = Mutex<HashMap<TicketId, u64>>;

/// What one reading of the files found.
pub(super) struct Reading {
    /// The rules, and the texts that they were read from.
    pub(super) rules: Result<(Rules, Texts), AccessStoreError>,
    /// The tickets that were revoked, whatever is wrong with the rest.
    pub(super) revoked: Vec<TicketId>,
    /// Whether the uses of tickets were written down.
    pub(super) noted: Result<(), AccessStoreError>,
}

/// Looks at the files until nobody follows the rules any more, and writes down which tickets were used. `problem` says
/// what is wrong with them for as long as it is.
pub(super) async fn keep_up(
    look: impl Fn(&Texts, Option<&HashMap<TicketId, u64>>) -> Reading + Clone + Send + 'static,
    mut texts: Texts,
    sender: watch::Sender<Arc<Rules>>,
    uses: Weak<Uses>,
    problem: Arc<Mutex<Option<String>>>,
) {
    let (mut unwritten, mut written) = (LastError::default(), HashMap::new());
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let used = uses
            .upgrade()
            .map(|uses| uses.lock().map(|uses| uses.clone()).unwrap_or_default());
        let used = used.filter(|used| *used != written);
        let (look, before, noting) = (look.clone(), texts.clone(), used.clone());
        let mut looking = tokio::task::spawn_blocking(move || look(&before, noting.as_ref()));
        let looked = match tokio::time::timeout(LOOK_MAX, &mut looking).await {
            Ok(looked) => looked,
            Err(_) => {
                let late =
                    format!("they were not read within {} s: does the file system hang?", LOOK_MAX.as_secs());
                tell(&problem, Some(late));
                tokio::select! {
                    () = sender.closed() => return,
                    looked = looking => looked,
                }
            }
        };
        let Reading { rules, revoked, noted } = match looked {
            Ok(looked) => looked,
            Err(error) if error.is_panic() => {
                tell(
                    &problem,
                    Some("reading them failed by an error of this program: please report it".into()),
                );
                continue;
            }
            Err(_) => return, // The runtime ends.
        };
        match rules {
            Ok((rules, read)) => {
                tell(&problem, None);
                replace(&sender, rules);
                texts = read;
            }
            Err(error) => {
                tell(&problem, Some(error.to_string()));
                // What is wrong with another file does not keep a stolen ticket valid.
                let known = sender.borrow().as_ref().clone();
                replace(&sender, Rules { revoked: revoked.into_iter().collect(), ..known });
            }
        }
        match noted {
            Err(error) => unwritten.tell(&error, "When tickets are used cannot be written down."),
            Ok(()) => written = used.unwrap_or(written),
        }
    }
}

/// Keeps what is wrong with the files, and says it once for as long as it lasts.
fn tell(problem: &Mutex<Option<String>>, now: Option<String>) {
    let mut known = problem.lock().unwrap_or_else(PoisonError::into_inner);
    match &now {
        Some(error) if now != *known => {
            tracing::warn!(%error, "The rules of access cannot be read; those of before stay in force.");
        }
        None if known.is_some() => tracing::info!("The rules of access can be read again."),
        _ => {}
    }
    *known = now;
}

/// Puts `rules` in force. What was taken away stays so for as long as the server runs: tickets and keys that were revoked or
/// are gone, and that nobody publishes whom the list does not name. A file that is cut short lets nobody in again.
fn replace(sender: &watch::Sender<Arc<Rules>>, mut rules: Rules) {
    sender.send_if_modified(|known| {
        rules.keep_revoked(known);
        let is_new = **known != rules;
        if is_new {
            tracing::info!("The rules of access were replaced.");
            *known = Arc::new(rules);
        }
        is_new
    });
}

/// The error that the log was told of last, so that it is told once for as long as it lasts.
#[derive(Debug, Default)]
struct LastError(String);

impl LastError {
    fn tell(&mut self, error: &AccessStoreError, what: &str) {
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

    /// Goal: whatever becomes of a look, the rules of before stay, that is told, and the next look is taken.
    /// Method: looks that panic, that hang, and that go well again.
    #[tokio::test]
    async fn a_look_that_fails_ends_nothing() {
        let (gate, opened) = std::sync::mpsc::channel::<bool>();
        let opened = Arc::new(Mutex::new(opened));
        let look = move |texts: &Texts, _: Option<&HashMap<TicketId, u64>>| {
            let is_good = opened.lock().unwrap_or_else(PoisonError::into_inner).recv().unwrap();
            assert!(is_good, "this look fails");
            let rules = Rules { open: true, ..Rules::default() };
            Reading { rules: Ok((rules, texts.clone())), revoked: vec![], noted: Ok(()) }
        };
        let sender = watch::Sender::new(Arc::new(Rules::default()));
        let (mut rules, problem) = (sender.subscribe(), Arc::<Mutex<Option<String>>>::default());
        let known = || problem.lock().unwrap().clone();
        let becomes = async |what: &str| {
            let deadline = tokio::time::Instant::now() + 2 * LOOK_MAX;
            while !known().is_some_and(|problem| problem.contains(what)) {
                assert!(tokio::time::Instant::now() < deadline, "{:?}", known());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::spawn(keep_up(look, Texts::default(), sender, Weak::new(), Arc::clone(&problem)));
        gate.send(false).unwrap();
        becomes("an error of this program").await;
        becomes("not read within").await;
        assert!(!rules.borrow().open);
        gate.send(true).unwrap();
        rules.changed().await.unwrap();
        assert!(rules.borrow().open && known().is_none());
    }
}
