//! The places of a version's tensors in memory. Pure: no memory is accessed.

use super::footprint::Footprint;
use std::ops::Range;

/// The memory that contiguous tensors occupy, with their names, in the order of addresses.
#[derive(Debug, Default)]
pub(crate) struct Places(Vec<Place>);

#[derive(Debug)]
struct Place {
    /// The GPU of the addresses; `None` for the host.
    gpu: Option<usize>,
    addresses: Range<usize>,
    tensor: Box<str>,
}

impl Places {
    pub(crate) fn new(tensors: impl Iterator<Item = (Box<str>, Footprint)>) -> Self {
        let place = |(tensor, footprint): (_, Footprint)| Place {
            gpu: footprint.gpu(),
            addresses: footprint.extent(),
            tensor,
        };
        let mut places: Vec<Place> = tensors.map(place).collect();
        places.sort_by_key(Place::start);
        Self(places)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A tensor that shares memory with one of `other`.
    pub(crate) fn shared_with(&self, other: &Self) -> Option<&str> {
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        // Of each side, the place that reaches furthest among those that begin before the next one.
        let (mut our_last, mut their_last) = (None::<&Place>, None::<&Place>);
        while let Some(next) = [ours.peek(), theirs.peek()]
            .into_iter()
            .flatten()
            .map(|place| place.start())
            .min()
        {
            if let Some(our) = ours.next_if(|place| place.start() == next) {
                if their_last.is_some_and(|last| last.reaches(our)) {
                    return Some(&our.tensor);
                }
                our_last = Some(our_last.filter(|last| last.end() > our.end()).unwrap_or(our));
            } else if let Some(their) = theirs.next() {
                if let Some(last) = our_last.filter(|last| last.reaches(their)) {
                    return Some(&last.tensor);
                }
                their_last = Some(their_last.filter(|last| last.end() > their.end()).unwrap_or(their));
            }
        }
        None
    }
}

impl Place {
    fn start(&self) -> (Option<usize>, usize) {
        (self.gpu, self.addresses.start)
    }

    fn end(&self) -> (Option<usize>, usize) {
        (self.gpu, self.addresses.end)
    }

    /// Whether it overlaps `later`, which begins at its start or later.
    fn reaches(&self, later: &Self) -> bool {
        self.end() > later.start()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(all: &[(Option<usize>, Range<usize>)]) -> Places {
        let place = |(gpu, addresses): &(Option<usize>, Range<usize>)| Place {
            gpu: *gpu,
            addresses: addresses.clone(),
            tensor: format!("{addresses:?}").into(),
        };
        let mut places: Vec<Place> = all.iter().map(place).collect();
        places.sort_by_key(Place::start);
        Places(places)
    }

    #[test]
    fn shared_memory_is_found() {
        let other = places(&[(None, 100..200), (None, 120..130), (None, 300..400), (Some(0), 500..600)]);
        for (ours, expected) in [
            (vec![(None, 0..100), (None, 200..300), (None, 400..900)], None),
            (vec![(None, 0..101)], Some("0..101")),
            (vec![(None, 10..20), (None, 199..200)], Some("199..200")),
            (vec![(None, 0..1000), (None, 1..2)], Some("0..1000")),
            (vec![(None, 300..400)], Some("300..400")),
            (vec![(None, 500..600), (Some(1), 500..600)], None),
            (vec![(None, 500..600), (Some(0), 599..700)], Some("599..700")),
            (vec![], None),
        ] {
            assert_eq!(places(&ours).shared_with(&other), expected, "{ours:?}");
        }
    }
}
