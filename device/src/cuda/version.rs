use std::fmt;

/// A CUDA version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32);

impl Version {
    /// The oldest supported version: 12.0, that of NVIDIA's driver 525 (2022).
    pub const OLDEST: Self = Self(12_000);

    /// The version before the driver was queried: older than all.
    pub(super) const UNKNOWN: Self = Self(0);

    /// Decodes a version from the driver: 13040 is 13.4.
    pub(super) fn decode(encoded: u32) -> Self {
        Self(encoded)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_formatted_as_major_and_minor() {
        assert_eq!(Version(13_040).to_string(), "13.4");
        assert_eq!(Version(12_000).to_string(), "12.0");
        assert!(Version(11_080) < Version::OLDEST);
    }
}
