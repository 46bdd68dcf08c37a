//! The order of the runs in a pair.

use super::contenders::Contender;

/// A run of `contender`, yet to be measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScheduledRun<'a> {
    pub(super) contender: &'a Contender,
    /// The contender that it is compared with, which runs right before or after it; `None` if it runs alone.
    pub(super) beside: Option<&'a str>,
}

/// The runs of pair number `pair`: the first contender and each other contender run in succession. Their order
/// alternates from pair to pair.
///
/// A contender that failed is left out, and so is the run of the first contender that would be compared with it. A
/// contender that is left with no other to be compared with runs alone.
pub(super) fn schedule<'a>(
    pair: u32,
    contenders: &'a [Contender],
    has_failed: impl Fn(&str) -> bool,
) -> Vec<ScheduledRun<'a>> {
    let Some((first, others)) = contenders.split_first() else { return vec![] };
    let run = |contender, beside| ScheduledRun { contender, beside };
    let others: Vec<&Contender> = others.iter().filter(|other| !has_failed(&other.name)).collect();
    match (has_failed(&first.name), others.is_empty()) {
        (true, _) => others.into_iter().map(|other| run(other, None)).collect(),
        (false, true) => vec![run(first, None)],
        (false, false) => {
            let pair_with = |other: &'a Contender| {
                let mut runs = [run(first, Some(other.name.as_str())), run(other, Some(&first.name))];
                if !pair.is_multiple_of(2) {
                    runs.reverse();
                }
                runs
            };
            others.into_iter().flat_map(pair_with).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{harness::contenders::Contenders, program::Program};

    /// The scheduled runs of `names` as text: `a-b` is a run of a that is compared with b.
    fn runs(pair: u32, names: &[&str], failed: &[&str]) -> Vec<String> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let contenders = Contenders::of_this(&Program::new("bench", &[]), None).pick(&names).unwrap();
        let text = |run: &ScheduledRun<'_>| format!("{}-{}", run.contender.name, run.beside.unwrap_or(""));
        schedule(pair, &contenders, |name| failed.contains(&name))
            .iter()
            .map(text)
            .collect()
    }

    #[test]
    fn compared_runs_are_neighbours_in_alternating_order() {
        let all = ["tensor-relay", "tcp", "tcp-tls"];
        let (first, second) = (runs(0, &all, &[]), runs(1, &all, &[]));
        assert_eq!(
            first,
            ["tensor-relay-tcp", "tcp-tensor-relay", "tensor-relay-tcp-tls", "tcp-tls-tensor-relay"]
        );
        assert_eq!(
            second,
            ["tcp-tensor-relay", "tensor-relay-tcp", "tcp-tls-tensor-relay", "tensor-relay-tcp-tls"]
        );
        assert_eq!(runs(2, &all[..2], &[]), ["tensor-relay-tcp", "tcp-tensor-relay"]);
    }

    #[test]
    fn failed_contenders_and_runs_compared_with_them_are_left_out() {
        let all = ["tensor-relay", "tcp", "tcp-tls"];
        assert_eq!(runs(0, &all, &["tcp"]), ["tensor-relay-tcp-tls", "tcp-tls-tensor-relay"]);
        assert_eq!(runs(0, &all, &["tcp", "tcp-tls"]), ["tensor-relay-"]);
        assert_eq!(runs(0, &all, &["tensor-relay"]), ["tcp-", "tcp-tls-"]);
        assert_eq!(runs(1, &all, &all), [""; 0]);
        assert_eq!(runs(1, &all[..1], &[]), ["tensor-relay-"]);
    }
}
