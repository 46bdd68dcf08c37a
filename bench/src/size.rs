//! Sizes with units, such as `64MiB`, parsed and formatted.

/// Parses `1GiB`, `64 MiB`, `4KiB`, `100B` or a plain number of bytes.
///
/// # Errors
/// A sentence for the command line, when `text` is none of these or does not fit 64 bits.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(format!("{unit:?} is no unit: write B, KiB, MiB or GiB")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
    number
        .checked_mul(scale)
        .ok_or_else(|| format!("{text} is more than 64 bits can count"))
}

/// Formats `bytes` in the largest unit that divides them.
pub fn text(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = |(shift, _): &(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    match units.into_iter().find(fits) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_sizes_are_parsed_again() {
        for (bytes, expected) in [(0, "0 B"), (1000, "1000 B"), (4 << 20, "4 MiB"), (1536 << 20, "1536 MiB")]
        {
            assert_eq!(text(bytes), expected);
            assert_eq!(parse(&text(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        assert_eq!(parse("64 MiB"), Ok(64 << 20));
        assert_eq!(parse("4096"), Ok(4096));
        for wrong in ["", "GiB", "1GB", "-1", "1.5GiB", "99999999999999999999", "99999999999GiB"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
