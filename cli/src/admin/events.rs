//! The most recent log events, for `/status`.

use serde_json::{Map, Value, json};
use std::{collections::VecDeque, fmt::Debug, time::SystemTime};
use tensor_relay_device::Lock;
use tracing::{
    Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, filter::filter_fn, layer::Context, registry::LookupSpan};

/// The number of retained events.
const EVENTS_MAX: usize = 64;

/// The maximum length of a message or a field, in characters.
const TEXT_MAX_CHARS: usize = 300;

/// The most recent events of this process, oldest first. A static, because a process has one log.
static RECENT: Lock<VecDeque<Value>> = Lock::new(VecDeque::new());

/// A log event, as `/status` shows it: a few microseconds of work, a few times for each session and version.
struct Event {
    message: String,
    fields: Map<String, Value>,
}

/// A tracing layer that retains this program's events of level `info` and above: a few for each session and version,
/// none for a chunk.
pub(crate) fn recorder<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
    let is_ours = filter_fn(|metadata| {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("tensor_relay")
    });
    Recorder.with_filter(is_ours.with_max_level_hint(Level::INFO))
}

/// The most recent events, newest first.
pub(super) fn recent() -> Vec<Value> {
    RECENT.lock().iter().rev().cloned().collect()
}

struct Recorder;

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Recorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut recorded = Event { message: String::new(), fields: Map::new() };
        event.record(&mut recorded);
        let shown = json!({
            "unix_s": since_1970.as_secs_f64(),
            "level": event.metadata().level().as_str().to_ascii_lowercase(),
            "message": recorded.message,
            "fields": recorded.fields,
        });
        let mut recent = RECENT.lock();
        if recent.len() == EVENTS_MAX {
            recent.pop_front();
        }
        recent.push_back(shown);
    }
}

impl Visit for Event {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = format!("{value:?}");
        if let Some((end, _)) = text.char_indices().nth(TEXT_MAX_CHARS) {
            text.truncate(end);
        }
        match field.name() {
            "message" => self.message = text,
            name => drop(self.fields.insert(name.into(), text.into())),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::prelude::*;

    #[test]
    fn the_newest_events_are_retained() {
        let subscriber = tracing_subscriber::registry().with(recorder());
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("Below the recorded level.");
            for number in 0..=EVENTS_MAX {
                tracing::info!(number, topic = %"a/b", "Something happened.");
            }
        });
        let events = recent();
        assert_eq!(events.len(), EVENTS_MAX);
        let (newest, oldest) = (&events[0], &events[EVENTS_MAX - 1]);
        assert_eq!((&newest["level"], &newest["message"]), (&json!("info"), &json!("Something happened.")));
        assert_eq!(newest["fields"], json!({ "number": "64", "topic": "a/b" }));
        assert_eq!(oldest["fields"]["number"], "1");
    }
}
