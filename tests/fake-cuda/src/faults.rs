use crate::status::Status;

/// What goes wrong, and when.
///
/// A fault is written `WHAT:NTH:EFFECT` or `WHAT:NTH:EFFECT:on`. *What* is the name of a function of the driver, `*` for
/// any of them, or an execution: `@htod`, `@dtoh`, `@dtod`, `@memset`, `@host` for a host function, `@free`. *Nth* counts
/// from 1 and from when the fault was added. The *effect* is a code or `hang`. With `on`, all that follow fail as well.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    faults: Vec<Fault>,
    /// Whether what hangs goes on.
    released: bool,
}

#[derive(Debug)]
struct Fault {
    what: String,
    nth: u64,
    effect: Effect,
    stays: bool,
    seen: u64,
}

/// What a fault does to a call, or to what executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// A call does nothing and gives this code. An execution stops half way, and spoils its context.
    Fail(Status),
    /// Nothing happens until the test releases what hangs.
    Hang,
}

impl Faults {
    /// Adds a fault; false if it is not written as it should be.
    pub(crate) fn add(&mut self, text: &str) -> bool {
        let fault = Fault::parse(text);
        self.released = false;
        fault.map(|fault| self.faults.push(fault)).is_some()
    }

    pub(crate) fn clear(&mut self) {
        self.faults.clear();
    }

    /// Lets go on what hangs, and what would hang from now on.
    pub(crate) fn release(&mut self) {
        self.released = true;
    }

    pub(crate) fn released(&self) -> bool {
        self.released
    }

    /// Counts that something happens, and says what is to go wrong with it.
    pub(crate) fn strike(&mut self, what: &str) -> Option<Effect> {
        let struck = self.faults.iter_mut().filter_map(|fault| fault.strike(what));
        // All are asked, because all of them count.
        struck.fold(None, |first, effect| first.or(Some(effect)))
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
        let stays = match parts.next() {
            None => false,
            Some("on") => true,
            Some(_) => return None,
        };
        (nth > 0 && parts.next().is_none()).then_some(Self { what, nth, effect, stays, seen: 0 })
    }

    fn strike(&mut self, what: &str) -> Option<Effect> {
        let any_call = self.what == "*" && !what.starts_with('@');
        if self.what != what && !any_call {
            return None;
        }
        self.seen += 1;
        (self.seen == self.nth || (self.stays && self.seen > self.nth)).then_some(self.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_when_it_should() {
        let mut faults = Faults::default();
        assert!(faults.add("cuMemAlloc_v2:2:719"));
        assert!(faults.add("@dtoh:1:hang:on"));
        let launch_failed = Some(Effect::Fail(Status::LAUNCH_FAILED));
        let strikes = ["cuMemAlloc_v2", "@htod", "cuMemAlloc_v2", "cuMemAlloc_v2", "@dtoh", "@dtoh"];
        let effects = strikes.map(|what| faults.strike(what));
        assert_eq!(effects, [None, None, launch_failed, None, Some(Effect::Hang), Some(Effect::Hang)]);
    }

    #[test]
    fn any_call_is_no_execution() {
        let mut faults = Faults::default();
        assert!(faults.add("*:2:1"));
        let effects = ["cuInit", "@host", "cuCtxSynchronize"].map(|what| faults.strike(what).is_some());
        assert_eq!(effects, [false, false, true]);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "cuInit", "cuInit:1", "cuInit:0:1", "cuInit:x:1", "cuInit:1:never", "cuInit:1:1:off"]
        {
            assert!(!Faults::default().add(text), "{text}");
        }
    }
}
