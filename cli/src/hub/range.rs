//! Ranges of a file that a request asks for (RFC 9110 §14).

use std::ops::Range;

/// What is sent of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selected {
    /// All of it.
    Whole,
    /// These bytes, at least one.
    Part(Range<u64>),
    /// Nothing: the file has no such bytes.
    Nothing,
}

/// What a request with these headers selects of a file of `bytes` with the entity tag `tag`. Several ranges, other units,
/// and ranges of another file (`If-Range`) select all of it, as clients have to expect.
pub(super) fn select(range: Option<&str>, if_range: Option<&str>, tag: &str, bytes: u64) -> Selected {
    let is_this = if_range.is_none_or(|wanted| wanted == format!("\"{tag}\""));
    match range.filter(|_| is_this).and_then(|range| range.strip_prefix("bytes=")) {
        Some(range) => parse(range.trim(), bytes).unwrap_or(Selected::Whole),
        None => Selected::Whole,
    }
}

/// `None` if the text is not one range.
fn parse(range: &str, bytes: u64) -> Option<Selected> {
    let (first, last) = range.split_once('-')?;
    let selected = match (first, last) {
        ("", suffix) => bytes.saturating_sub(number(suffix)?)..bytes,
        (first, "") => number(first)?..bytes,
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return None;
            }
            first..last.saturating_add(1).min(bytes)
        }
    };
    Some(if selected.is_empty() { Selected::Nothing } else { Selected::Part(selected) })
}

/// A number of decimal digits; one beyond the largest counts as that.
fn number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(range: &str) -> Selected {
        select(Some(range), None, "t", 100)
    }

    #[test]
    fn one_range_is_selected() {
        for (text, range) in [
            ("bytes=0-0", 0..1),
            ("bytes=10-19", 10..20),
            ("bytes=99-", 99..100),
            ("bytes=50-1000", 50..100),
            ("bytes=-1", 99..100),
            ("bytes=-1000", 0..100),
            ("bytes=0-99999999999999999999999", 0..100),
        ] {
            assert_eq!(of(text), Selected::Part(range), "{text}");
        }
    }

    #[test]
    fn what_a_file_does_not_have_is_not_sent() {
        for text in ["bytes=100-", "bytes=100-200", "bytes=-0", "bytes=99999999999999999999999-"] {
            assert_eq!(of(text), Selected::Nothing, "{text}");
        }
        assert_eq!(select(Some("bytes=0-"), None, "t", 0), Selected::Nothing);
    }

    #[test]
    fn other_ranges_select_everything() {
        for text in
            ["", "bytes=", "bytes=-", "bytes=5-4", "bytes=0-1,3-4", "bytes=+1-2", "items=0-1", "bytes=a-b"]
        {
            assert_eq!(of(text), Selected::Whole, "{text}");
        }
        assert_eq!(select(None, None, "t", 100), Selected::Whole);
    }

    #[test]
    fn a_range_of_another_file_selects_everything() {
        let with = |if_range| select(Some("bytes=1-"), Some(if_range), "t", 100);
        assert_eq!(with("\"t\""), Selected::Part(1..100));
        for other in ["\"u\"", "t", "W/\"t\"", "Wed, 21 Oct 2015 07:28:00 GMT"] {
            assert_eq!(with(other), Selected::Whole, "{other}");
        }
    }
}
