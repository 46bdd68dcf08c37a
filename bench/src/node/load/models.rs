//! The tensors of published models, with the names and shapes of their checkpoints.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tensor_relay_protocol::{Dtype, Shape, TensorName, TensorSpec};

/// A model whose tensor names and shapes are built in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// OpenAI's GPT-2 of 124 million parameters, as f32: 148 tensors, 475 MiB.
    #[value(name = "gpt2")]
    Gpt2,
    /// Meta's Llama 3 of 8 billion parameters, as bf16: 291 tensors, 15 GiB.
    #[value(name = "llama-3-8b")]
    Llama3_8b,
    /// torchvision's ResNet-50, as f32 with 53 counters of i64: 320 tensors, 98 MiB.
    #[value(name = "resnet-50")]
    ResNet50,
}

impl Model {
    /// The tensors of the model, with the number of rows of each multiplied by `scale`, but at least one row: the same
    /// names, and about `scale` times the size.
    ///
    /// # Errors
    /// When `scale` is not above 0, or is above [`SCALE_MAX`].
    pub(crate) fn tensors(self, scale: f64) -> Result<Vec<TensorSpec>> {
        ensure!(
            scale > 0.0 && scale <= SCALE_MAX,
            "a model can be scaled by more than 0 and at most {SCALE_MAX}, not by {scale}"
        );
        let mut model = ModelTensors { scale, tensors: Vec::new() };
        match self {
            Self::Gpt2 => gpt2(&mut model),
            Self::Llama3_8b => llama(&mut model),
            Self::ResNet50 => resnet(&mut model),
        }
        Ok(model.tensors)
    }
}

/// The maximum scale, with which sizes are far from an overflow.
const SCALE_MAX: f64 = 1e3;

/// The tensors of a model so far, and the scale of their rows.
struct ModelTensors {
    scale: f64,
    tensors: Vec<TensorSpec>,
}

impl ModelTensors {
    fn add(&mut self, dtype: Dtype, name: impl AsRef<str>, dimensions: &[u64]) {
        let mut dimensions = dimensions.to_vec();
        if let Some(rows) = dimensions.first_mut() {
            *rows = ((*rows as f64 * self.scale).round() as u64).max(1);
        }
        let name = TensorName::new(name.as_ref()).expect("the names below are short ASCII words");
        let shape =
            Shape::new(&dimensions).expect("the shapes below are far from overflow, scaled by 1000 or not");
        self.tensors.push(TensorSpec::new(name, dtype, shape));
    }

    fn f32(&mut self, name: impl AsRef<str>, dimensions: &[u64]) {
        self.add(Dtype::F32, name, dimensions);
    }

    fn bf16(&mut self, name: impl AsRef<str>, dimensions: &[u64]) {
        self.add(Dtype::Bf16, name, dimensions);
    }

    /// Adds a weight matrix in GPT-2's layout, inputs first, and its bias.
    fn linear(&mut self, name: &str, inputs: u64, outputs: u64) {
        self.f32(format!("{name}.weight"), &[inputs, outputs]);
        self.f32(format!("{name}.bias"), &[outputs]);
    }

    /// Adds the tensors of a layer normalisation: a gain and a bias.
    fn layer_norm(&mut self, name: &str, width: u64) {
        self.f32(format!("{name}.weight"), &[width]);
        self.f32(format!("{name}.bias"), &[width]);
    }

    /// Adds the tensors of a batch normalisation: those of a layer normalisation, the statistics, and the number of
    /// batches that these include.
    fn batch_norm(&mut self, name: &str, width: u64) {
        self.layer_norm(name, width);
        self.f32(format!("{name}.running_mean"), &[width]);
        self.f32(format!("{name}.running_var"), &[width]);
        self.add(Dtype::I64, format!("{name}.num_batches_tracked"), &[]);
    }

    fn convolution(&mut self, name: &str, outputs: u64, inputs: u64, kernel_size: u64) {
        self.f32(format!("{name}.weight"), &[outputs, inputs, kernel_size, kernel_size]);
    }
}

fn gpt2(model: &mut ModelTensors) {
    const WIDTH: u64 = 768;
    model.f32("wte.weight", &[50_257, WIDTH]);
    model.f32("wpe.weight", &[1_024, WIDTH]);
    for layer in 0..12 {
        let name = |part: &str| format!("h.{layer}.{part}");
        model.layer_norm(&name("ln_1"), WIDTH);
        model.linear(&name("attn.c_attn"), WIDTH, 3 * WIDTH);
        model.linear(&name("attn.c_proj"), WIDTH, WIDTH);
        model.layer_norm(&name("ln_2"), WIDTH);
        model.linear(&name("mlp.c_fc"), WIDTH, 4 * WIDTH);
        model.linear(&name("mlp.c_proj"), 4 * WIDTH, WIDTH);
    }
    model.layer_norm("ln_f", WIDTH);
}

fn llama(model: &mut ModelTensors) {
    const WIDTH: u64 = 4_096;
    const KEY_VALUE_WIDTH: u64 = 1_024; // Eight heads of keys and values for thirty-two heads of queries.
    const MLP_WIDTH: u64 = 14_336;
    const VOCABULARY: u64 = 128_256;
    model.bf16("model.embed_tokens.weight", &[VOCABULARY, WIDTH]);
    for layer in 0..32 {
        let mut add = |part: &str, dimensions: &[u64]| {
            model.bf16(format!("model.layers.{layer}.{part}.weight"), dimensions);
        };
        add("input_layernorm", &[WIDTH]);
        add("mlp.down_proj", &[WIDTH, MLP_WIDTH]);
        add("mlp.gate_proj", &[MLP_WIDTH, WIDTH]);
        add("mlp.up_proj", &[MLP_WIDTH, WIDTH]);
        add("post_attention_layernorm", &[WIDTH]);
        add("self_attn.k_proj", &[KEY_VALUE_WIDTH, WIDTH]);
        add("self_attn.o_proj", &[WIDTH, WIDTH]);
        add("self_attn.q_proj", &[WIDTH, WIDTH]);
        add("self_attn.v_proj", &[KEY_VALUE_WIDTH, WIDTH]);
    }
    model.bf16("model.norm.weight", &[WIDTH]);
    model.bf16("lm_head.weight", &[VOCABULARY, WIDTH]);
}

fn resnet(model: &mut ModelTensors) {
    model.convolution("conv1", 64, 3, 7);
    model.batch_norm("bn1", 64);
    let mut inputs = 64;
    for (stage, (blocks, width)) in (1..).zip([(3, 64), (4, 128), (6, 256), (3, 512)]) {
        for block in 0..blocks {
            let name = |part: &str| format!("layer{stage}.{block}.{part}");
            let outputs = 4 * width;
            model.convolution(&name("conv1"), width, inputs, 1);
            model.batch_norm(&name("bn1"), width);
            model.convolution(&name("conv2"), width, width, 3);
            model.batch_norm(&name("bn2"), width);
            model.convolution(&name("conv3"), outputs, width, 1);
            model.batch_norm(&name("bn3"), outputs);
            if block == 0 {
                model.convolution(&name("downsample.0"), outputs, inputs, 1);
                model.batch_norm(&name("downsample.1"), outputs);
            }
            inputs = outputs;
        }
    }
    model.f32("fc.weight", &[1_000, inputs]);
    model.f32("fc.bias", &[1_000]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(tensors: &[TensorSpec], value: impl Fn(&TensorSpec) -> u64) -> u64 {
        tensors.iter().map(value).sum()
    }

    /// Compares with the numbers of parameters that the models' publishers state.
    #[test]
    fn parameter_counts_are_those_published() {
        let count = |model: Model| {
            let tensors = model.tensors(1.0).unwrap();
            let statistics = ["running_mean", "running_var", "num_batches_tracked"];
            let is_parameter =
                |spec: &&TensorSpec| !statistics.iter().any(|part| spec.name.as_str().ends_with(part));
            let parameters = tensors.iter().filter(is_parameter).map(|spec| spec.shape.elements()).sum();
            (tensors.len(), parameters)
        };
        assert_eq!(count(Model::Gpt2), (148, 124_439_808));
        assert_eq!(count(Model::Llama3_8b), (291, 8_030_261_248));
        assert_eq!(count(Model::ResNet50), (320, 25_557_032));
    }

    #[test]
    fn a_scaled_model_has_the_same_tensors_and_a_scaled_size() {
        let bytes = |spec: &TensorSpec| spec.shape.byte_len(spec.dtype).unwrap();
        for model in [Model::Gpt2, Model::Llama3_8b, Model::ResNet50] {
            let (whole, scaled) = (model.tensors(1.0).unwrap(), model.tensors(0.01).unwrap());
            let names = |tensors: &[TensorSpec]| tensors.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&whole), names(&scaled));
            let ratio = sum(&scaled, bytes) as f64 / sum(&whole, bytes) as f64;
            assert!((0.009..0.012).contains(&ratio), "{model:?}: {ratio}");
        }
    }

    #[test]
    fn absurd_scales_are_refused() {
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            assert!(Model::Gpt2.tensors(scale).is_err(), "{scale}");
        }
        assert!(Model::Llama3_8b.tensors(SCALE_MAX).is_ok());
        assert_eq!(Model::Gpt2.tensors(1e-9).unwrap().len(), 148);
    }
}
