# Finds the libraries and fixes the compile options shared by every target.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ICU REQUIRED COMPONENTS uc)  # Unicode normalisation of tokenizers
find_package(MPI QUIET COMPONENTS C)

find_library(OPENBLAS_LIBRARY NAMES openblas REQUIRED)
find_path(OPENBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas x86_64-linux-gnu openblas-pthread
          HINTS /usr/include/x86_64-linux-gnu/openblas-pthread /usr/include/aarch64-linux-gnu/openblas-pthread REQUIRED)
add_library(openblas_imported INTERFACE)
target_link_libraries(openblas_imported INTERFACE ${OPENBLAS_LIBRARY})
target_include_directories(openblas_imported SYSTEM INTERFACE ${OPENBLAS_INCLUDE})
add_library(BLAS::OpenBLAS ALIAS openblas_imported)

# Compressed data files are read where the libraries are there; without them such a file is refused by name.
add_library(tessera_compression INTERFACE)
find_package(ZLIB QUIET)
if(ZLIB_FOUND)
  target_link_libraries(tessera_compression INTERFACE ZLIB::ZLIB)
  target_compile_definitions(tessera_compression INTERFACE TESSERA_WITH_ZLIB=1)
else()
  message(STATUS "Tessera: no zlib found, .gz data is not read")
endif()
find_library(ZSTD_LIBRARY NAMES zstd)
find_path(ZSTD_INCLUDE zstd.h)
if(ZSTD_LIBRARY AND ZSTD_INCLUDE)
  target_link_libraries(tessera_compression INTERFACE ${ZSTD_LIBRARY})
  target_include_directories(tessera_compression SYSTEM INTERFACE ${ZSTD_INCLUDE})
  target_compile_definitions(tessera_compression INTERFACE TESSERA_WITH_ZSTD=1)
else()
  message(STATUS "Tessera: no libzstd found, .zst data is not read")
endif()

# Parquet data is read where Arrow's C++ libraries are there: its CMake packages, or a folder ARROW_ROOT with
# include/ and the libraries (PyPI's pyarrow is one; its libraries carry only the versioned name).
add_library(tessera_parquet INTERFACE)
find_package(Parquet QUIET CONFIG)
if(TARGET Parquet::parquet_shared)
  target_link_libraries(tessera_parquet INTERFACE Parquet::parquet_shared)
  target_compile_definitions(tessera_parquet INTERFACE TESSERA_WITH_PARQUET=1)
  message(STATUS "Tessera: Parquet ${Parquet_VERSION}")
else()
  find_path(PARQUET_INCLUDE parquet/file_reader.h HINTS ${ARROW_ROOT} PATH_SUFFIXES include)
  file(GLOB found_parquet ${ARROW_ROOT}/libparquet.so* ${ARROW_ROOT}/lib/libparquet.so*)
  file(GLOB found_arrow ${ARROW_ROOT}/libarrow.so* ${ARROW_ROOT}/lib/libarrow.so*)
  find_library(PARQUET_LIBRARY NAMES parquet)
  find_library(ARROW_LIBRARY NAMES arrow)
  list(APPEND found_parquet ${PARQUET_LIBRARY})
  list(APPEND found_arrow ${ARROW_LIBRARY})
  list(FILTER found_parquet EXCLUDE REGEX "NOTFOUND")
  list(FILTER found_arrow EXCLUDE REGEX "NOTFOUND")
  if(PARQUET_INCLUDE AND found_parquet AND found_arrow)
    list(GET found_parquet 0 found_parquet)
    list(GET found_arrow 0 found_arrow)
    target_link_libraries(tessera_parquet INTERFACE ${found_parquet} ${found_arrow})
    target_include_directories(tessera_parquet SYSTEM INTERFACE ${PARQUET_INCLUDE})
    target_compile_definitions(tessera_parquet INTERFACE TESSERA_WITH_PARQUET=1)
    message(STATUS "Tessera: Parquet ${found_parquet}")
  else()
    message(STATUS "Tessera: no Arrow C++ libraries found, .parquet data is not read")
  endif()
endif()

set(TESSERA_WITH_CUDA OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a)
    endif()
    # Hopper's own instructions are in code for 90a alone.
    list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
    list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90-real$" "90a-real")
    enable_language(CUDA)
    find_package(CUDAToolkit 12.9 REQUIRED)
    # CMake 3.25 does not know that nvcc speaks C++20.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(TESSERA_WITH_CUDA ON)
  elseif(TESSERA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_CUDA=ON but no CUDA compiler was found (nvcc on PATH or CUDACXX)")
  endif()
endif()
set(TESSERA_CUDA_LIBRARIES)
set(TESSERA_WITH_CUDNN OFF)
set(TESSERA_WITH_NCCL OFF)
if(TESSERA_WITH_CUDA)
  # Libraries beside the toolkit, from the distribution, or from pip's nvidia packages (CUDNN_ROOT,
  # NCCL_ROOT name such a folder; their libraries carry only the versioned name).
  find_path(CUDNN_INCLUDE cudnn.h HINTS ${CUDNN_ROOT} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${CUDNN_ROOT} ${CUDAToolkit_LIBRARY_DIR}
               PATH_SUFFIXES lib lib64)
  find_path(CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${CMAKE_SOURCE_DIR}/.deps/include
            ${CUDAToolkit_INCLUDE_DIRS})
  find_path(NCCL_INCLUDE nccl.h HINTS ${NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} ${CUDAToolkit_LIBRARY_DIR}
               PATH_SUFFIXES lib lib64)
  if(CUDNN_INCLUDE AND CUDNN_LIBRARY AND CUDNN_FRONTEND_INCLUDE)
    set(TESSERA_WITH_CUDNN ON)
    # The frontend headers refer to NVRTC.
    list(APPEND TESSERA_CUDA_LIBRARIES ${CUDNN_LIBRARY} CUDA::nvrtc)
    set(found_cudnn "cuDNN ${CUDNN_LIBRARY}")
  else()
    set(found_cudnn "no cuDNN (needs cudnn.h, libcudnn and the cudnn-frontend headers in .deps/include)")
  endif()
  if(NCCL_INCLUDE AND NCCL_LIBRARY)
    set(TESSERA_WITH_NCCL ON)
    list(APPEND TESSERA_CUDA_LIBRARIES ${NCCL_LIBRARY})
    set(found_nccl "NCCL ${NCCL_LIBRARY}")
  else()
    set(found_nccl "no NCCL (one GPU only)")
  endif()
  message(STATUS "Tessera: CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}, "
                 "${found_cudnn}, ${found_nccl}")
else()
  message(STATUS "Tessera: CPU-only build (no CUDA toolkit in use)")
endif()

add_library(tessera_options INTERFACE)
target_include_directories(tessera_options INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(tessera_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-missing-field-initializers>
  # GCC 12 warns of overlapping copies inside std::string (its bug 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
# What CUDA sources need, and no others.
add_library(tessera_cuda INTERFACE)
if(TESSERA_WITH_CUDA)
  target_link_libraries(tessera_cuda INTERFACE CUDA::cudart CUDA::cublasLt ${TESSERA_CUDA_LIBRARIES})
  target_compile_definitions(tessera_cuda INTERFACE $<$<BOOL:${TESSERA_WITH_CUDNN}>:TESSERA_WITH_CUDNN=1>
                                                    $<$<BOOL:${TESSERA_WITH_NCCL}>:TESSERA_WITH_NCCL=1>)
  # nvcc's front end cannot evaluate fmt 9's compile-time format check; g++ checks the same headers.
  target_compile_definitions(tessera_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_CONSTEVAL=> $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
  # -lineinfo costs nothing at run time and lets profilers and compute-sanitizer name source lines.
  target_compile_options(tessera_cuda INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers>)
  foreach(include IN ITEMS ${CUDNN_INCLUDE} ${CUDNN_FRONTEND_INCLUDE} ${NCCL_INCLUDE})
    if(include AND NOT include STREQUAL "/usr/include")
      target_include_directories(tessera_cuda SYSTEM INTERFACE ${include})
    endif()
  endforeach()
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1
    # gcc's flow warnings are false alarms in instrumented code; the other presets keep them.
    -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds -Wno-restrict
    -Wno-tsan>)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
