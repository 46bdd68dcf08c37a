//! The option that cuts tensors into pieces.

use tensor_relay_server::Splits;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SplitArgs {
    /// Cut tensors whose name matches GLOB into PARTS equal parts of one dimension, for subscribers that take a part of
    /// each: e.g. columns, `**.o_proj.weight=1/8`. Or `tensor-parallel=PARTS`, the usual weights of which tensor-parallel
    /// ranks take columns. Repeat the option for several rules, or separate them by `,`; the first that matches applies.
    #[arg(long, value_name = "GLOB=DIM/PARTS", value_delimiter = ',', help_heading = "Topics")]
    split: Vec<Splits>,
}

impl SplitArgs {
    /// The rules of all options.
    pub(crate) fn splits(&self) -> Splits {
        let mut all = Splits::default();
        self.split.iter().cloned().for_each(|rules| all.extend(rules));
        all
    }
}
