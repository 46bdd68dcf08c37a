//! Prometheus' older text format, for scrapers and tools without OpenMetrics.

use std::collections::HashSet;

/// Converts metrics from OpenMetrics to format 0.0.4: in the metadata of counters, names get the suffix `_total` of
/// their samples; units and the end marker are removed.
pub(super) fn from_open_metrics(text: &str) -> String {
    let counters: HashSet<&str> = text.lines().filter_map(counter).collect();
    let mut classic = String::with_capacity(text.len());
    for line in text.lines() {
        match metadata(line) {
            Some((_, "EOF" | "UNIT", _)) => continue,
            Some((name, keyword, value)) if counters.contains(name) => {
                classic += &format!("# {keyword} {name}_total {value}\n");
            }
            _ => {
                classic += line;
                classic.push('\n');
            }
        }
    }
    classic
}

/// The name of the counter that a `# TYPE` line declares.
fn counter(line: &str) -> Option<&str> {
    let (name, keyword, kind) = metadata(line)?;
    (keyword == "TYPE" && kind == "counter").then_some(name)
}

/// The parts of a metadata line such as `# TYPE name gauge`: name, keyword and value.
fn metadata(line: &str) -> Option<(&str, &str, &str)> {
    let line = line.strip_prefix("# ")?;
    let (keyword, tail) = line.split_once(' ').unwrap_or((line, ""));
    let (name, value) = tail.split_once(' ').unwrap_or((tail, ""));
    Some((name, keyword, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_metadata_gets_the_suffix_total() {
        let open = "\
# HELP x_bytes Bytes.
# TYPE x_bytes counter
# UNIT x_bytes bytes
x_bytes_total{a=\"b\"} 1
# HELP y Some.
# TYPE y gauge
y 2
# EOF
";
        let classic = "\
# HELP x_bytes_total Bytes.
# TYPE x_bytes_total counter
x_bytes_total{a=\"b\"} 1
# HELP y Some.
# TYPE y gauge
y 2
";
        assert_eq!(from_open_metrics(open), classic);
    }
}
