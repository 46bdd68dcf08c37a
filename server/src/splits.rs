//! [`Splits`]: which tensors a publisher cuts into pieces, for readers of parts of them.

mod tensor_parallel;

use std::{fmt, str::FromStr};
use tensor_relay_protocol::{Cuts, Glob, GlobError, Shape, TensorName, TensorSpec};

/// A rule: tensors whose name matches are cut into equal parts of one dimension. A reader of one part receives it and
/// little more, also where its bytes are spread over the whole tensor: columns of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The tensors.
    pub tensors: Glob,
    /// The dimension.
    pub dimension: u32,
    /// The number of parts, of `ceil(length / parts)` indices each; the last ones may be shorter, or missing.
    pub parts: u32,
}

/// Rules, of which the first that matches a tensor applies to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Splits(Vec<Split>);

/// The number of parts of the list `tensor-parallel` if none is given: the GPUs of a usual server.
const PARTS_DEFAULT: u32 = 8;

/// The name of the shipped list.
const TENSOR_PARALLEL: &str = "tensor-parallel";

/// Why a rule for one tensor cannot be applied. Rules with wildcards pass over tensors that they do not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// No tensor has the name.
    #[error(
        "there is no tensor {0}, which is to be split: correct the name, or use a glob, which may match none"
    )]
    NoSuchTensor(Box<Glob>),
    /// The tensor does not have the dimension, or it is shorter than the number of parts.
    #[error(
        "tensor {name} of shape {shape} cannot be split into {parts} parts of dimension {dimension}: choose a dimension \
         of at least that length"
    )]
    DoesNotFit {
        /// The tensor.
        name: TensorName,
        /// Its shape.
        shape: Shape,
        /// The dimension.
        dimension: u32,
        /// The number of parts.
        parts: u32,
    },
}

/// Why a text is not a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseSplitError {
    /// It is neither a rule nor the name of a list.
    #[error(
        "{0:?} is not a split: write GLOB=DIMENSION/PARTS, e.g. **.o_proj.weight=1/8, or tensor-parallel=PARTS"
    )]
    Form(Box<str>),
    /// The glob is not valid.
    #[error(transparent)]
    Glob(#[from] GlobError),
}

impl Split {
    /// The cuts of a tensor of this shape; `None` if it does not fit.
    fn cuts(&self, shape: &Shape) -> Option<Cuts> {
        let length = *shape.dimensions().get(self.dimension as usize)?;
        (length >= u64::from(self.parts)).then(|| Cuts::equal(self.dimension, length, self.parts))
    }
}

impl Splits {
    /// The rules, in this order.
    pub fn new(rules: impl IntoIterator<Item = Split>) -> Self {
        Self(rules.into_iter().collect())
    }

    /// The list for tensor-parallel readers: the weights of which each of `parts` ranks of vLLM or Megatron takes
    /// columns. Where ranks take rows, the bytes of each lie together without a split.
    pub fn tensor_parallel(parts: u32) -> Self {
        let globs = tensor_parallel::COLUMN_CUT.iter();
        let rules = globs.map(|glob| Glob::new(glob).expect("the list has valid globs"));
        Self::new(rules.map(|tensors| Split { tensors, dimension: 1, parts }))
    }

    /// Adds further rules behind these.
    pub fn extend(&mut self, further: Self) {
        self.0.extend(further.0);
    }

    /// Cuts tensors as the rules say. Aliases stay as they are: they share the pieces of the tensor that they name.
    ///
    /// # Errors
    /// [`SplitError`] when a rule without wildcards has no tensor, or one that it does not fit.
    pub fn apply(&self, specs: &mut [TensorSpec]) -> Result<(), SplitError> {
        let has_tensor = |rule: &&Split| specs.iter().any(|spec| rule.tensors.matches(spec.name.as_str()));
        let mut literals = self.0.iter().filter(|rule| rule.tensors.is_literal());
        if let Some(rule) = literals.find(|rule| !has_tensor(rule)) {
            return Err(SplitError::NoSuchTensor(Box::new(rule.tensors.clone())));
        }
        specs
            .iter_mut()
            .filter(|spec| spec.alias_of.is_none())
            .try_for_each(|spec| self.cut(spec))
    }

    fn cut(&self, spec: &mut TensorSpec) -> Result<(), SplitError> {
        let first = self.0.iter().find(|rule| rule.tensors.matches(spec.name.as_str()));
        let Some(rule) = first else { return Ok(()) };
        match rule.cuts(&spec.shape) {
            Some(cuts) => spec.cuts = cuts,
            None if rule.tensors.is_literal() => {
                let (name, shape) = (spec.name.clone(), spec.shape.clone());
                return Err(SplitError::DoesNotFit {
                    name,
                    shape,
                    dimension: rule.dimension,
                    parts: rule.parts,
                });
            }
            None => {}
        }
        Ok(())
    }
}

/// Rules separated by `,`: `GLOB=DIMENSION/PARTS`, or the name of the shipped list, `tensor-parallel` or
/// `tensor-parallel=PARTS`.
impl FromStr for Splits {
    type Err = ParseSplitError;

    fn from_str(text: &str) -> Result<Self, ParseSplitError> {
        let rules: Result<Vec<Self>, _> = text.split(',').map(Self::parse_one).collect();
        Ok(Self::new(rules?.into_iter().flat_map(|rules| rules.0)))
    }
}

impl Splits {
    /// Parses a rule, or the name of the list.
    fn parse_one(text: &str) -> Result<Self, ParseSplitError> {
        let form = || ParseSplitError::Form(text.into());
        let number = |text: &str| text.parse::<u32>().map_err(|_| form());
        let parts =
            |text: &str| number(text).and_then(|parts| if parts > 0 { Ok(parts) } else { Err(form()) });
        if text == TENSOR_PARALLEL {
            return Ok(Self::tensor_parallel(PARTS_DEFAULT));
        }
        let (tensors, cut) = text.rsplit_once('=').ok_or_else(form)?;
        match cut.split_once('/') {
            None if tensors == TENSOR_PARALLEL => Ok(Self::tensor_parallel(parts(cut)?)),
            None => Err(form()),
            Some((dimension, count)) => {
                let (dimension, parts) = (number(dimension)?, parts(count)?);
                Ok(Self::new([Split { tensors: Glob::new(tensors)?, dimension, parts }]))
            }
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}/{}", self.tensors, self.dimension, self.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tensor_relay_protocol::Dtype;

    fn spec(name: &str, dimensions: &[u64]) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::Bf16, Shape::new(dimensions).unwrap())
    }

    fn cut(rules: &[&str], name: &str, dimensions: &[u64]) -> Result<Cuts, SplitError> {
        let mut splits = Splits::default();
        rules.iter().for_each(|rule| splits.extend(rule.parse().unwrap()));
        let mut specs = [spec(name, dimensions)];
        splits.apply(&mut specs)?;
        let [spec] = specs;
        Ok(spec.cuts)
    }

    proptest! {
        /// Every rule is parsed from what it is written as; any other text is an error.
        #[test]
        fn rules_are_parsed(tensors in "[a-z.*=/]{1,9}", dimension: u32, parts in 1u32.., other in ".{0,9}") {
            let split = Split { tensors: Glob::new(&tensors).unwrap(), dimension, parts };
            prop_assert_eq!(split.to_string().parse(), Ok(Splits::new([split])));
            if !other.contains('/') && !other.starts_with(TENSOR_PARALLEL) {
                prop_assert!(other.parse::<Splits>().is_err());
            }
        }
    }

    #[test]
    fn the_first_matching_rule_applies() {
        let rules = ["a.*=1/2", "**=0/4"];
        assert_eq!(cut(&rules, "a.w", &[8, 6]), Ok(Cuts::equal(1, 6, 2)));
        assert_eq!(cut(&rules, "b.w", &[8, 6]), Ok(Cuts::equal(0, 8, 4)));
        assert_eq!(cut(&rules, "a.bias", &[6]), Ok(Cuts::NONE), "it has no dimension 1");
        assert_eq!(cut(&rules, "b.bias", &[3]), Ok(Cuts::NONE), "it is too short");
    }

    #[test]
    fn a_rule_for_one_tensor_must_fit() {
        assert_eq!(cut(&["w=1/2"], "w", &[8, 6]), Ok(Cuts::equal(1, 6, 2)));
        for (rule, shape) in [("w=2/2", &[8, 6][..]), ("w=1/7", &[8, 6]), ("w=0/2", &[])] {
            let error = cut(&[rule], "w", shape).unwrap_err();
            assert!(matches!(&error, SplitError::DoesNotFit { name, .. } if name.as_str() == "w"), "{error}");
        }
        assert!(matches!(cut(&["other=1/2"], "w", &[8, 6]), Err(SplitError::NoSuchTensor(_))));
    }

    #[test]
    fn the_list_cuts_columns_of_usual_models() {
        let cut = |list: &str, name: &str| cut(&[list], name, &[64, 64]).unwrap();
        for name in [
            "model.layers.3.self_attn.o_proj.weight",
            "model.layers.3.mlp.experts.7.down_proj.weight",
            "gpt_neox.layers.0.attention.dense.weight",
            "decoder.layers.1.self_attention.linear_proj.weight",
        ] {
            assert_eq!(cut("tensor-parallel", name), Cuts::equal(1, 64, 8), "{name}");
            assert_eq!(cut("tensor-parallel=4", name), Cuts::equal(1, 64, 4), "{name}");
        }
        assert_eq!(cut("tensor-parallel", "model.layers.3.self_attn.q_proj.weight"), Cuts::NONE);
    }

    #[test]
    fn aliases_are_not_cut() {
        let mut specs = [spec("w", &[4, 4]), TensorSpec { alias_of: Some(0), ..spec("tied", &[4, 4]) }];
        "**=1/2".parse::<Splits>().unwrap().apply(&mut specs).unwrap();
        assert!(!specs[0].cuts.is_empty() && specs[1].cuts.is_empty());
    }
}
