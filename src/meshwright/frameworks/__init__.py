"""Readers, checks and writers for the configs of other training frameworks.

Names are imported on first use: the readers of eight frameworks take longer to import than a plan takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.frameworks.registry import NAMES as NAMES
from meshwright.frameworks.registry import framework as framework
from meshwright.lazy_names import LazyNames

if TYPE_CHECKING:  # the names of the table below, for type checkers
    from meshwright.frameworks.announced import lost_lines as lost_lines
    from meshwright.frameworks.announced import with_comments as with_comments
    from meshwright.frameworks.applied_fixes import FixedText as FixedText
    from meshwright.frameworks.applied_fixes import fixed_text as fixed_text
    from meshwright.frameworks.assumed_values import as_in_files as as_in_files
    from meshwright.frameworks.check_file import check as check
    from meshwright.frameworks.check_file import stated_gpus as stated_gpus
    from meshwright.frameworks.detection import NATIVE as NATIVE
    from meshwright.frameworks.detection import detect_framework as detect_framework
    from meshwright.frameworks.detection import framework_of as framework_of
    from meshwright.frameworks.detection import require_framework as require_framework
    from meshwright.frameworks.detection import with_settings as with_settings
    from meshwright.frameworks.dropped import DroppedSetting as DroppedSetting
    from meshwright.frameworks.dropped import dropped_settings as dropped_settings
    from meshwright.frameworks.dropped import require_model as require_model
    from meshwright.frameworks.environment import ENVIRONMENT_PATHS as ENVIRONMENT_PATHS
    from meshwright.frameworks.environment import open_weights as open_weights
    from meshwright.frameworks.environment import variables_in as variables_in
    from meshwright.frameworks.export_recipe import covers_goal as covers_goal
    from meshwright.frameworks.export_recipe import export as export
    from meshwright.frameworks.export_recipe import exported_engine as exported_engine
    from meshwright.frameworks.export_recipe import exported_kernels as exported_kernels
    from meshwright.frameworks.export_recipe import exported_layout as exported_layout
    from meshwright.frameworks.export_recipe import in_version as in_version
    from meshwright.frameworks.export_recipe import lost_numbers as lost_numbers
    from meshwright.frameworks.export_recipe import write as write
    from meshwright.frameworks.file_import import ImportedFile as ImportedFile
    from meshwright.frameworks.file_import import import_file as import_file
    from meshwright.frameworks.file_import import starts_from_weights as starts_from_weights
    from meshwright.frameworks.framework import Content as Content
    from meshwright.frameworks.framework import Framework as Framework
    from meshwright.frameworks.initial_weights import in_folder as in_folder
    from meshwright.frameworks.initial_weights import loadable_weights as loadable_weights
    from meshwright.frameworks.initial_weights import weights_to_prepare as weights_to_prepare
    from meshwright.frameworks.joint_repair import pasted_fixes as pasted_fixes
    from meshwright.frameworks.load import content_of as content_of
    from meshwright.frameworks.load import format_of as format_of
    from meshwright.frameworks.load import open_file as open_file
    from meshwright.frameworks.mapping import no_effect as no_effect
    from meshwright.frameworks.model_differences import as_replaced as as_replaced
    from meshwright.frameworks.model_match import model_option as model_option
    from meshwright.frameworks.native import check_native as check_native
    from meshwright.frameworks.native import is_native as is_native
    from meshwright.frameworks.native import looks_native as looks_native
    from meshwright.frameworks.native import train_command as train_command
    from meshwright.frameworks.open_length import open_length_of_recipe as open_length_of_recipe
    from meshwright.frameworks.other_trainers import OtherTrainerError as OtherTrainerError
    from meshwright.frameworks.our_fixes import in_export as in_export
    from meshwright.frameworks.our_fixes import in_our_keys as in_our_keys
    from meshwright.frameworks.our_fixes import superseded as superseded
    from meshwright.frameworks.patch_file import own_variables as own_variables
    from meshwright.frameworks.patch_file import patch as patch
    from meshwright.frameworks.patch_file import referenced_file as referenced_file
    from meshwright.frameworks.result import BaselineEntry as BaselineEntry
    from meshwright.frameworks.result import CheckResult as CheckResult
    from meshwright.frameworks.result import IgnoredFinding as IgnoredFinding
    from meshwright.frameworks.result import RecipeCheckResult as RecipeCheckResult
    from meshwright.frameworks.result import UnresolvedValue as UnresolvedValue
    from meshwright.frameworks.run_tokenizer import tokenizer_findings as tokenizer_findings
    from meshwright.frameworks.suffixes import SUFFIXES as SUFFIXES
    from meshwright.frameworks.suffixes import is_file as is_file
    from meshwright.frameworks.types import ExportedConfig as ExportedConfig
    from meshwright.frameworks.types import Program as Program
    from meshwright.frameworks.types import Settings as Settings
    from meshwright.frameworks.types import SourcedValue as SourcedValue
    from meshwright.frameworks.types import UnmappedField as UnmappedField

__getattr__ = LazyNames(
    __name__,
    {
        "frameworks.announced": "lost_lines with_comments",
        "frameworks.assumed_values": "as_in_files",
        "frameworks.check_file": "check stated_gpus",
        "frameworks.dropped": "DroppedSetting dropped_settings require_model",
        "frameworks.environment": "ENVIRONMENT_PATHS open_weights variables_in",
        "frameworks.export_recipe": (
            "covers_goal export exported_engine exported_kernels exported_layout in_version lost_numbers write"
        ),
        "frameworks.detection": "NATIVE detect_framework framework_of require_framework with_settings",
        "frameworks.file_import": "ImportedFile import_file starts_from_weights",
        "frameworks.applied_fixes": "FixedText fixed_text",
        "frameworks.framework": "Content Framework",
        "frameworks.initial_weights": "in_folder loadable_weights weights_to_prepare",
        "frameworks.joint_repair": "pasted_fixes",
        "frameworks.load": "content_of format_of open_file",
        "frameworks.mapping": "no_effect",
        "frameworks.model_differences": "as_replaced",
        "frameworks.model_match": "model_option",
        "frameworks.native": "check_native is_native looks_native train_command",
        "frameworks.open_length": "open_length_of_recipe",
        "frameworks.other_trainers": "OtherTrainerError",
        "frameworks.our_fixes": "in_export in_our_keys superseded",
        "frameworks.patch_file": "own_variables patch referenced_file",
        "frameworks.result": "BaselineEntry CheckResult IgnoredFinding RecipeCheckResult UnresolvedValue",
        "frameworks.run_tokenizer": "tokenizer_findings",
        "frameworks.suffixes": "SUFFIXES is_file",
        "frameworks.types": "ExportedConfig Program Settings SourcedValue UnmappedField",
    },
)
