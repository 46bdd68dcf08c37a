//! Keeps the rules of a running server what their files say.

use super::{AccessStore, AccessStoreError, Rules};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};
use tensor_relay_protocol::TicketId;
use tokio::sync::watch;

/// How often a running server looks at the files.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// Looks at the files until nobody follows the rules any more, and writes down which tickets were used.
pub(super) async fn keep_up(
    store: AccessStore,
    sender: watch::Sender<Arc<Rules>>,
    uses: Weak<Mutex<HashMap<TicketId, u64>>>,
) {
    let (mut unread, mut unwritten, mut written) =
        (LastError::default(), LastError::default(), HashMap::new());
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let used = uses
            .upgrade()
            .map(|uses| uses.lock().map(|uses| uses.clone()).unwrap_or_default());
        let used = used.filter(|used| *used != written);
        let (looking, noting) = (store.clone(), used.clone());
        let look = tokio::task::spawn_blocking(move || {
            (looking.rules(), looking.revoked(), noting.map(|used| looking.note_uses(&used)))
        });
        let Ok((rules, revoked, noted)) = look.await else { return }; // The runtime ends.
        match rules {
            Ok(rules) => {
                unread = LastError::default();
                replace(&sender, rules);
            }
            Err(error) => {
                unread.tell(&error, "The rules of access cannot be read; those of before stay in force.");
                // What is wrong with another file does not keep a stolen ticket valid.
                let known = sender.borrow().as_ref().clone();
                replace(
                    &sender,
                    Rules { revoked: revoked.unwrap_or_default().into_iter().collect(), ..known },
                );
            }
        }
        match noted {
            Some(Err(error)) => unwritten.tell(&error, "When tickets are used cannot be written down."),
            _ => written = used.unwrap_or(written),
        }
    }
}

/// Puts `rules` in force. What was revoked stays so for as long as the server runs: a file that is cut short while it is
/// written lets nobody in again.
fn replace(sender: &watch::Sender<Arc<Rules>>, mut rules: Rules) {
    sender.send_if_modified(|known| {
        rules.revoked.extend(&known.revoked);
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
