use crate::status::Status;

/// The faults to inject.
///
/// A fault is written `WHAT:NTH:EFFECT` or `WHAT:NTH:EFFECT:on`. *What* is the name of a driver function, `*` for any
/// function, or work of a stream: `@htod`, `@dtoh`, `@dtod`, `@memset`, `@host` for a host function, `@free`. *Nth*
/// counts occurrences after the fault is added, from 1. The *effect* is an error code or `hang`. With `on`, all later
/// occurrences are affected as well.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    faults: Vec<Fault>,
    /// Whether hanging calls and work are released.
    released: bool,
}

#[derive(Debug)]
struct Fault {
    what: String,
    nth: u64,
    effect: Effect,
    is_permanent: bool,
    occurrences: u64,
}

/// The effect of a fault on a call or on work of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// A call returns this code without doing anything. Work of a stream corrupts its context: a copy after half of its
    /// bytes, a host function without being called, other work after it is done.
    Fail(Status),
    /// The call or the work waits until a test releases it or resets the machine.
    Hang,
}

impl Faults {
    /// Adds a fault; false if its syntax is invalid.
    pub(crate) fn add(&mut self, text: &str) -> bool {
        let fault = Fault::parse(text);
        self.released = false;
        fault.map(|fault| self.faults.push(fault)).is_some()
    }

    pub(crate) fn clear(&mut self) {
        self.faults.clear();
    }

    /// Releases hanging calls and work, and prevents further hangs until the next fault is added.
    pub(crate) fn release(&mut self) {
        self.released = true;
    }

    pub(crate) fn released(&self) -> bool {
        self.released
    }

    /// Counts an occurrence of `what`, and returns the effect of the first fault that applies to it.
    pub(crate) fn count(&mut self, what: &str) -> Option<Effect> {
        let effects = self.faults.iter_mut().filter_map(|fault| fault.count(what));
        // Not `find`: every fault counts the occurrence.
        effects.fold(None, |first, effect| first.or(Some(effect)))
    }
}

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let what = parts.next()?.to_owned();
        let nth = parts.next()?.parse().ok()?;
        let effect = match parts.next()? {
            "hang" => Effect::Hang,
            code => Effect::Fail(Status(code.parse().ok()?)),
        };
        let is_permanent = match parts.next() {
            None => false,
            Some("on") => true,
            Some(_) => return None,
        };
        (nth > 0 && parts.next().is_none()).then_some(Self {
            what,
            nth,
            effect,
            is_permanent,
            occurrences: 0,
        })
    }

    fn count(&mut self, what: &str) -> Option<Effect> {
        let any_call = self.what == "*" && !what.starts_with('@');
        if self.what != what && !any_call {
            return None;
        }
        self.occurrences += 1;
        (self.occurrences == self.nth || (self.is_permanent && self.occurrences > self.nth))
            .then_some(self.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_affects_the_chosen_occurrences() {
        let mut faults = Faults::default();
        assert!(faults.add("cuMemAlloc_v2:2:719"));
        assert!(faults.add("@dtoh:1:hang:on"));
        let launch_failed = Some(Effect::Fail(Status::LAUNCH_FAILED));
        let occurrences = ["cuMemAlloc_v2", "@htod", "cuMemAlloc_v2", "cuMemAlloc_v2", "@dtoh", "@dtoh"];
        let effects = occurrences.map(|what| faults.count(what));
        assert_eq!(effects, [None, None, launch_failed, None, Some(Effect::Hang), Some(Effect::Hang)]);
    }

    #[test]
    fn the_wildcard_matches_calls_only() {
        let mut faults = Faults::default();
        assert!(faults.add("*:2:1"));
        let effects = ["cuInit", "@host", "cuCtxSynchronize"].map(|what| faults.count(what).is_some());
        assert_eq!(effects, [false, false, true]);
    }

    #[test]
    fn invalid_syntax_is_refused() {
        for text in ["", "cuInit", "cuInit:1", "cuInit:0:1", "cuInit:x:1", "cuInit:1:never", "cuInit:1:1:off"]
        {
            assert!(!Faults::default().add(text), "{text}");
        }
    }
}
