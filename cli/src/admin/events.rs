//! Recent events: the last log messages.

use serde_json::{Map, Value, json};
use std::{
    collections::VecDeque,
    fmt::Debug,
    sync::{Mutex, PoisonError},
    time::SystemTime,
};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, filter::filter_fn, layer::Context, registry::LookupSpan};

/// The number of events kept.
const REMEMBERED: usize = 64;

/// How long the text of one field may be.
const TEXT_MAX: usize = 300;

/// The last events of this process, oldest first. There is one log, and so one such list.
static LATELY: Mutex<VecDeque<Value>> = Mutex::new(VecDeque::new());

/// A tracing layer that keeps this program's events of level `info` and above. They are few: some for each session and
/// version, none for a chunk.
pub(crate) fn remember<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
    let is_ours = filter_fn(|metadata| {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("tensor_relay")
    });
    Memory.with_filter(is_ours.with_max_level_hint(Level::INFO))
}

/// The last events, the newest first.
pub(super) fn lately() -> Vec<Value> {
    LATELY
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .rev()
        .cloned()
        .collect()
}

struct Memory;

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Memory {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let event = json!({
            "unix_s": at.as_secs_f64(),
            "level": event.metadata().level().as_str().to_ascii_lowercase(),
            "message": fields.message,
            "fields": fields.others,
        });
        let mut lately = LATELY.lock().unwrap_or_else(PoisonError::into_inner);
        if lately.len() == REMEMBERED {
            lately.pop_front();
        }
        lately.push_back(event);
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text: String = value.chars().take(TEXT_MAX).collect();
        match field.name() {
            "message" => self.message = text,
            name => drop(self.others.insert(name.to_owned(), text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::prelude::*;

    #[test]
    fn the_newest_events_are_remembered() {
        let subscriber = tracing_subscriber::registry().with(remember());
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("Too small.");
            for number in 0..=REMEMBERED {
                tracing::info!(number, topic = %"a/b", "Something happened.");
            }
        });
        let lately = lately();
        assert_eq!(lately.len(), REMEMBERED);
        let (newest, oldest) = (&lately[0], &lately[REMEMBERED - 1]);
        assert_eq!((&newest["level"], &newest["message"]), (&json!("info"), &json!("Something happened.")));
        assert_eq!(newest["fields"], json!({ "number": "64", "topic": "a/b" }));
        assert_eq!(oldest["fields"]["number"], "1");
    }
}
