use crate::Lock;
use std::time::Duration;

use crate::mapping::PageSize;

/// The measured cost of populating memory in pages of either size.
///
/// Huge pages are populated in half the time of small ones, and are faster to use. But a virtual machine that returns
/// free memory to its host ("free page reporting") does so in blocks of the size of huge pages: then each huge page
/// takes hundreds of faults in the host, up to ten times the cost of small pages in blocks that the machine has kept.
/// Compaction for huge pages may also take the kernel long. No file reports this, so it is measured.
#[derive(Debug, Default)]
pub(super) struct PageCosts {
    huge: Cost,
    small: Cost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Cost {
    #[default]
    Unknown,
    /// A measurement is running.
    Tried,
    /// The processor time per MiB.
    Known(Duration),
}

/// The factor by which huge pages may cost more than small ones, since they are faster to use and to unmap.
const HUGE_COST_FACTOR_MAX: u32 = 2;

/// The process-wide costs of private memory: all memory comes from the same kernel.
pub(super) static PRIVATE_PAGES: Lock<PageCosts> = Lock::new(PageCosts::new());

/// The process-wide costs of the pages of memfds, which the kernel makes in other ways.
pub(super) static SHARED_PAGES: Lock<PageCosts> = Lock::new(PageCosts::new());

impl PageCosts {
    const fn new() -> Self {
        Self { huge: Cost::Unknown, small: Cost::Unknown }
    }

    /// The preferred page size: huge, unless known to be too expensive.
    pub(super) fn preferred(&self) -> PageSize {
        match (self.huge, self.small) {
            (Cost::Known(huge), Cost::Known(small)) if huge > small * HUGE_COST_FACTOR_MAX => PageSize::Small,
            _ => PageSize::Huge,
        }
    }

    /// The page size for a piece whose cost will be [recorded](Self::record): each size once, then the preferred one.
    /// While the cost of huge pages is being measured, other pieces get small pages.
    pub(super) fn choose(&mut self) -> PageSize {
        match (self.huge, self.small) {
            (Cost::Unknown, _) => {
                self.huge = Cost::Tried;
                PageSize::Huge
            }
            (_, Cost::Unknown) => {
                self.small = Cost::Tried;
                PageSize::Small
            }
            (Cost::Tried, _) => PageSize::Small,
            _ => self.preferred(),
        }
    }

    /// Records the processor time for `bytes`; `None` if the kernel could not populate them.
    pub(super) fn record(&mut self, size: PageSize, bytes: usize, time: Option<Duration>) {
        let per_mib = |time: Duration| time.mul_f64((1 << 20) as f64 / bytes as f64);
        let cost = time.map_or(Cost::Unknown, |time| Cost::Known(per_mib(time)));
        match size {
            PageSize::Huge => self.huge = cost,
            PageSize::Small => self.small = cost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn us(micros: u64) -> Option<Duration> {
        Some(Duration::from_micros(micros))
    }

    fn known(huge: u64, small: u64) -> PageCosts {
        let mut costs = PageCosts::default();
        for (expected, time) in [(PageSize::Huge, huge), (PageSize::Small, small)] {
            let size = costs.choose();
            assert_eq!(size, expected, "each size is tried once");
            costs.record(size, 4 * MIB, us(4 * time));
        }
        costs
    }

    #[test]
    fn huge_pages_are_chosen_unless_they_cost_much_more() {
        for (huge, small, expected) in
            [(100, 350, PageSize::Huge), (600, 350, PageSize::Huge), (800, 350, PageSize::Small)]
        {
            let mut costs = known(huge, small);
            assert_eq!((costs.choose(), costs.preferred()), (expected, expected));
        }
    }

    #[test]
    fn the_choice_follows_the_latest_cost() {
        let mut costs = known(100, 350);
        costs.record(PageSize::Huge, MIB, us(4000));
        assert_eq!(costs.choose(), PageSize::Small);
        costs.record(PageSize::Small, MIB, us(2500));
        assert_eq!(costs.choose(), PageSize::Huge, "small pages cost more now");
    }

    #[test]
    fn a_running_measurement_delays_nobody() {
        let mut costs = PageCosts::default();
        let chosen: Vec<_> = (0..3).map(|_| costs.choose()).collect();
        assert_eq!(chosen, [PageSize::Huge, PageSize::Small, PageSize::Small]);
        assert_eq!(costs.preferred(), PageSize::Huge);
        costs.record(PageSize::Small, MIB, us(1));
        assert_eq!(costs.choose(), PageSize::Small);
        costs.record(PageSize::Huge, MIB, us(1));
        assert_eq!(costs.choose(), PageSize::Huge);
    }

    #[test]
    fn without_measurements_pages_stay_huge() {
        let mut costs = PageCosts::default();
        for _ in 0..3 {
            let size = costs.choose();
            costs.record(size, MIB, None);
        }
        assert_eq!(costs.preferred(), PageSize::Huge);
    }
}
