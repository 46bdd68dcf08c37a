//! What was measured, for people.

use super::outcome::{Comparison, Measured, Ratio};
use crate::{
    size,
    stats::{PairedRatio, Summary},
};
use std::fmt;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.runs.first().map_or(0, |run| run.rounds.len());
        writeln!(f, "{} over {}", size::text(self.size_bytes), self.network)?;
        writeln!(f, "medians over runs (least to most) of medians over {rounds} rounds; CPU of both sides")?;
        let name = self.contenders.iter().map(|c| c.name.len()).max().unwrap_or(0).max(NAME.len());
        let row = |f: &mut fmt::Formatter<'_>, [first, secure, speed, cpu, small]: [&str; 5]| {
            writeln!(f, "{first:<name$}  {secure:<9}  {speed:<24}  {cpu:<24}  {small}")
        };
        row(f, [NAME, "encrypted", "GB/s", "CPU s/GiB", "4 KiB one way, us (99 %)"])?;
        for contender in &self.contenders {
            let secure = if contender.encrypted { "yes" } else { "no" };
            let [speed, cpu] = [contender.gb_per_s, contender.cpu_s_per_gib].map(cell);
            row(f, [&contender.name, secure, &speed, &cpu, &small(contender)])?;
        }
        self.ratios.iter().try_for_each(|ratio| write!(f, "{ratio}"))?;
        let failed = self.contenders.iter().filter_map(|c| Some((&c.name, c.failure.as_ref()?)));
        failed
            .into_iter()
            .try_for_each(|(name, reason)| writeln!(f, "{name} failed: {reason}"))
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, of: &str, ratio: Option<PairedRatio>| match ratio {
            Some(ratio) => writeln!(f, "{} / {}, {of} {ratio}", self.of, self.to),
            None => Ok(()),
        };
        line(f, "GB/s: ", self.gb_per_s)?;
        line(f, "CPU:  ", self.cpu_s_per_gib)?;
        line(f, "4 KiB:", self.small_p50_us)
    }
}

const NAME: &str = "contender";

fn cell(summary: Option<Summary>) -> String {
    let text = |Summary { median, min, max }| format!("{median:.3} ({min:.3} to {max:.3})");
    summary.map_or_else(|| "–".into(), text)
}

fn small(contender: &Measured) -> String {
    match (contender.small_p50_us, contender.small_p99_us) {
        (Some(p50), Some(p99)) => format!("{:.0} ({:.0})", p50.median, p99.median),
        _ => "–".into(),
    }
}

#[cfg(test)]
mod tests {
    use crate::compare::outcome::tests::example;

    #[test]
    fn a_row_for_each_and_a_line_for_each_ratio() {
        let table = example().to_string();
        assert!(table.starts_with("64 MiB over loopback"), "{table}");
        assert!(table.contains("tensor-relay  yes        4.000 (4.000 to 4.000)"), "{table}");
        assert!(table.contains("100 (200)"), "{table}");
        assert!(
            table.contains("tensor-relay / tcp, GB/s:  2.000 (2.000 to 2.000, 96.9 % of 6 pairs)"),
            "{table}"
        );
        assert!(table.ends_with("tcp-tls failed: it ended early\n"), "{table}");
    }
}
