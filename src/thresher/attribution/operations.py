"""What is known of the operations of autograd, by the names of their nodes: which of them keep rows in their order."""

from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """
Abs Acos Acosh Add Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy BinaryCrossEntropyWithLogits
Ceil Celu Clamp ClampMax ClampMin Clone Copy Copysign Cos Cosh Cummax Cummin Cumprod Cumsum Digamma Div Elu Erf Erfc
Erfinv Exp Exp2 Expand Expm1 Floor Fmax Fmin Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh
HuberLoss Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid LogSoftmax Logaddexp Logaddexp2 Logit MaskedFill
Maximum Minimum Mish MseLoss Mul NanToNum NativeDropout Neg Pow Reciprocal Relu Relu6 Remainder Round Rrelu
RreluWithNoise Rsqrt Rsub SafeSoftmax Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh SmoothL1Loss SoftMarginLoss Softmax
Softplus Softshrink Sqrt Sub Tan Tanh Threshold To ToCopy Trunc Where Xlog1Py Xlogy torch::autograd::Copy
"""
)
"""Operations whose element i is computed from element i of operands that are not broadcast along the rows."""

ROW_MAJOR = _names("Reshape ReshapeAlias Squeeze UnsafeView Unsqueeze View")
"""Operations that leave the elements in their order, and change the shape."""

ALONG = _names(
    """
Amax Amin Cat Flip Gather IndexSelect Kthvalue LinalgVectorNorm Logcumsumexp Logsumexp Max Mean Median Min Mode
Nanmedian Nansum Norm Prod Roll Select Slice Sort Split SplitWithSizes Stack Std StdMean Sum Topk Transpose Unbind
Unfold Var VarMean
"""
)
"""Operations that act along the dimensions that they name, and keep the others in their order."""

_FIRST = _names(
    """
AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D BatchNorm Cdist Convolution
ConvolutionOverrideable CudnnBatchNorm CudnnConvolution FusedRmsNorm Glu Linear MaxPool2DWithIndices
MaxPool3DWithIndices MkldnnConvolution Mm MultiMarginLoss MultilabelMarginLoss Mv NativeBatchNorm NativeGroupNorm
NativeLayerNorm NllLoss NllLoss2D PixelShuffle PixelUnshuffle Prelu PreluKernel UpsampleBicubic2D UpsampleBilinear2D
UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleTrilinear3D
"""
)
_ATTENTION = _names(
    """
ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
ScaledDotProductFlashAttentionForCpu
"""
)

OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_FIRST, (0,)),
    **dict.fromkeys(_ATTENTION, (0, 1, 2)),
    "Addmm": (1,),
    "Addmv": (1,),
    "Bmm": (0, 1),
    "Baddbmm": (0, 1, 2),
}
"""Operations whose row i is computed from row i of these operands."""
